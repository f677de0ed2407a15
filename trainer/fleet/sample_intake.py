"""What workers have sent: fetched side by side, and checked in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from trainer.algorithm.traces import Trace
from trainer.fleet.objects import Objects
from trainer.fleet.scheduler import GivenUnit
from trainer.fleet.units import UNREADABLE, RolloutUnit, unpack_samples
from trainer.fleet.verify import AskedUnit, samples_refusal
from trainer.storage.seal import ForgedObject

MOST_AT_ONCE = 16
"""Units whose samples are in memory at a time, before they are checked."""


@dataclass(frozen=True)
class SentUnit:
    """A unit whose samples a worker says to have sent."""

    worker: str
    given: GivenUnit
    key: str
    unit: RolloutUnit | None
    """What it was asked; None where nobody wants its samples any more, which are then not read."""
    is_probe: bool = False


class RefusedSamples(ValueError):
    """Why what a worker wrote may not train."""


Received = list[Trace] | RefusedSamples | ForgedObject | FileNotFoundError | None
"""Samples; or why they may not train; or why what lies there is not what the worker wrote; or nothing, where
they were not read."""


class SampleIntake:
    """Reads every unit that workers have sent once."""

    def __init__(self, objects: Objects, expected: AskedUnit, pool: Executor) -> None:
        self._objects, self._expected = objects, expected
        self._pool = pool
        self._units_read: set[tuple[str, GivenUnit]] = set()
        """(worker, the unit as it was assigned to it)"""

    def unread(self, worker: str, sent: Iterable[GivenUnit]) -> list[GivenUnit]:
        """The units that were not read before."""
        return [given for given in sent if (worker, given) not in self._units_read]

    def mark_read(self, sent: SentUnit) -> None:
        """Lets `unread` leave a unit out from now on."""
        self._units_read.add((sent.worker, sent.given))

    def read(self, sent: Sequence[SentUnit]) -> Iterator[tuple[SentUnit, Received]]:
        """Reads and checks samples, in the order of `sent`. Raises StorageError."""
        for start in range(0, len(sent), MOST_AT_ONCE):
            batch = sent[start : start + MOST_AT_ONCE]
            # a row's prompt is made into tokens by this thread alone
            limits = [self._expected.most_bytes(unit.unit) if unit.unit else 0 for unit in batch]
            for unit, body in zip(batch, self._pool.map(self._fetch, batch, limits), strict=True):
                yield unit, check_samples(unit, body, self._expected) if isinstance(body, bytes) else body

    def _fetch(self, sent: SentUnit, most_bytes: int) -> bytes | ForgedObject | FileNotFoundError | None:
        try:
            return self._objects.get(sent.key, most_bytes) if sent.unit else None
        except (ForgedObject, FileNotFoundError) as error:
            return error


def check_samples(sent: SentUnit, body: bytes, expected: AskedUnit) -> list[Trace] | RefusedSamples:
    """The samples in what a worker wrote, or why they may not train."""
    assert sent.unit is not None
    try:
        sampled = unpack_samples(body)
        why = samples_refusal(sent.unit, sent.given.turn, sent.worker, sampled, expected)
    except UNREADABLE as error:
        why = f"it cannot be read: {error}"
    return RefusedSamples(why) if why else sampled.traces
