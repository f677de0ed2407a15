"""A part of a rank's process that counts. Not a test itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from trainer.ranks.process import RankProcess


class Counting:
    """It remembers between calls, and yields slowly."""

    def __init__(self, process: RankProcess) -> None:
        self.process, self.calls = process, 0

    def call(self, number: int) -> tuple[int, int, int]:
        self.calls += 1
        return self.process.rank, number, self.calls

    def fail(self, rank: int) -> None:
        if self.process.rank == rank:
            raise ValueError(f"rank {rank} has a reason")

    def slowly(self, mark: str, count: int, pause_s: float) -> Iterator[tuple[int, int]]:
        Path(f"{mark}-{self.process.rank}").touch()
        for number in range(count):
            time.sleep(pause_s)
            yield self.process.rank, number

    def breaks(self) -> Iterator[int]:
        yield 1
        raise ValueError("broken in the middle")
