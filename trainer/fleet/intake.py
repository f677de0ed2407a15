"""What workers have sent: fetched side by side, and checked in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trainer.algorithm.traces import Trace
from trainer.fleet.objects import Objects
from trainer.fleet.scheduler import Given
from trainer.fleet.units import UNREADABLE, RolloutUnit, unpack
from trainer.fleet.verify import AskedUnit, refusal
from trainer.storage.seal import Forged

MOST_AT_ONCE = 16
"""Units whose samples are in memory at a time, before they are checked."""


@dataclass(frozen=True)
class Sent:
    """A unit whose samples a worker says to have sent."""

    worker: str
    given: Given
    key: str
    unit: RolloutUnit | None
    """What it was asked; None where nobody wants its samples any more, which are then not read."""
    is_probe: bool = False


@dataclass(frozen=True)
class Received:
    """What came of it: samples, or why there are none; neither where they were not read."""

    traces: list[Trace] | None = None
    refused: str = ""
    """Why what the worker wrote may not train."""
    forged: str = ""
    """Why what lies there is not what the worker wrote."""


class Intake:
    """Reads samples of one attempt. Raises StorageError."""

    def __init__(self, objects: Objects, expected: AskedUnit, pool: ThreadPoolExecutor) -> None:
        self.objects, self.expected = objects, expected
        self._pool = pool

    def read(self, sent: Sequence[Sent]) -> Iterator[tuple[Sent, Received]]:
        """All of them, in order."""
        for start in range(0, len(sent), MOST_AT_ONCE):
            some = sent[start : start + MOST_AT_ONCE]
            # a row's prompt is made into tokens by this thread alone
            limits = [self.expected.most_bytes(one.unit) if one.unit else 0 for one in some]
            for one, body in zip(some, self._pool.map(self._fetch, some, limits), strict=True):
                yield one, self._check(one, body)

    def _fetch(self, sent: Sent, most_bytes: int) -> bytes | Exception | None:
        if sent.unit is None:
            return None
        try:
            return self.objects.get(sent.key, most_bytes)
        except (Forged, FileNotFoundError) as error:
            return error

    def _check(self, sent: Sent, body: bytes | Exception | None) -> Received:
        if sent.unit is None or body is None:
            return Received()
        if isinstance(body, Exception):
            return Received(forged=str(body))
        try:
            sampled = unpack(body)
            why = refusal(sent.unit, sent.given.turn, sent.worker, sampled, self.expected)
        except UNREADABLE as error:
            return Received(refused=f"it cannot be read: {error}")
        return Received(refused=why) if why else Received(sampled.traces)
