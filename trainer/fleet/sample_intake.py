"""What workers have sent: fetched side by side, and checked in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
"""What came of it: samples; why they may not train; why what lies there is not what the worker wrote; or
nothing, where they were not read."""


def read_samples(
    sent: Sequence[SentUnit], objects: Objects, expected: AskedUnit, pool: ThreadPoolExecutor
) -> Iterator[tuple[SentUnit, Received]]:
    """All of them, in order. Raises StorageError."""

    def fetch(one: SentUnit, most_bytes: int) -> bytes | ForgedObject | FileNotFoundError | None:
        try:
            return objects.get(one.key, most_bytes) if one.unit else None
        except (ForgedObject, FileNotFoundError) as error:
            return error

    for start in range(0, len(sent), MOST_AT_ONCE):
        some = sent[start : start + MOST_AT_ONCE]
        # a row's prompt is made into tokens by this thread alone
        limits = [expected.most_bytes(one.unit) if one.unit else 0 for one in some]
        for one, found in zip(some, pool.map(fetch, some, limits), strict=True):
            yield one, check_samples(one, found, expected) if isinstance(found, bytes) else found


def check_samples(sent: SentUnit, body: bytes, expected: AskedUnit) -> list[Trace] | RefusedSamples:
    """The samples in what a worker wrote, or why they may not train."""
    assert sent.unit is not None
    try:
        sampled = unpack_samples(body)
        why = samples_refusal(sent.unit, sent.given.turn, sent.worker, sampled, expected)
    except UNREADABLE as error:
        why = f"it cannot be read: {error}"
    return RefusedSamples(why) if why else sampled.traces
