"""A part of a rank's process that counts. Not a test itself."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch

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


class Dying:
    """A part whose methods end the process."""

    def __init__(self, process):
        pass

    def by_memory_that_is_gone(self):
        """A tensor's operation, in several threads, on memory whose second half has gone back."""
        libc = ctypes.CDLL(None)
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        memory = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        tensor = torch.frombuffer(memory, dtype=torch.float32)
        torch.set_num_threads(4)
        libc.munmap(tensor.data_ptr() + (4 << 20), 4 << 20)
        tensor.add_(1.0)

    def by_a_kill(self):
        os.kill(os.getpid(), signal.SIGKILL)
