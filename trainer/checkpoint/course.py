"""Which checkpoints count: the one definition that finder, retention, budget and every reader share.

It stands in the record of attempts. When an attempt starts, its record names the checkpoints that are there
and count; before its first own one it notes the step that it goes on from. From then on count: its own, and
of the named those up to that step. So what a run was taken back from, what was passed over as damaged, and
what an older attempt commits after it was replaced counts no more, whether or not it could be deleted. Needs
no training stack.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from trainer.checkpoint.layout import CheckpointKey, Counts, attempts_url, checkpoint_keys, local_dir
from trainer.checkpoint.manifest import every_manifest, manifests_here
from trainer.config import RunConfig
from trainer.storage.attempt_record import AttemptRecord, attempt_number
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage
from trainer.storage.stores import RetryPolicy


@dataclass(frozen=True)
class CheckpointHistory:
    """What the newest attempt that says so tells of its run's checkpoints."""

    attempt: str = ""
    """Its name; "": none says anything, and every checkpoint counts."""
    counted: frozenset[CheckpointKey] = frozenset()
    """The checkpoints that counted when it started."""
    goes_on_from: int | None = None
    """The step from which its own checkpoints go on; None before the first."""
    before: int = 0
    """`checkpoint.before` of that attempt."""

    def counts(self, step: int, attempt: str) -> bool:
        """Whether a checkpoint is of the history that the run goes on with."""
        if (
            not self.attempt
            or attempt == self.attempt
            or attempt_number(attempt) > attempt_number(self.attempt)
        ):
            return True
        left_behind = self.goes_on_from is not None and step > self.goes_on_from
        return (step, attempt) in self.counted and not left_behind


def history_from_record(record: AttemptRecord, epoch: int | None = None) -> CheckpointHistory:
    """The history as attempt `epoch` sees it; None: the newest one."""
    if epoch is None:
        newest = record.newest()
        epoch = newest.attempt.epoch if newest else 0
    for begun in record.starts(epoch):
        if begun.counted is not None:
            origin = record.origin(begun.epoch)
            return CheckpointHistory(
                attempt=begun.name,
                counted=frozenset(begun.counted),
                goes_on_from=origin.step if origin and origin.name == begun.name else None,
                before=begun.before,
            )
    return CheckpointHistory()


def history_of(config: RunConfig, retry: RetryPolicy | None = None) -> CheckpointHistory:
    """The history of a run. Raises StorageError where its store is away."""
    return history_from_record(AttemptRecord(Storage(attempts_url(config), retry=retry), Seal.of(config)))


def at_start(config: RunConfig, past: CheckpointHistory, storage: Storage | None) -> list[CheckpointKey]:
    """The checkpoints that count for an attempt of `config` that starts now, sorted."""
    before = config.checkpoint.before
    keys = checkpoint_keys(config, storage)
    if before and not past.attempt:  # of a run whose record does not say yet what counts
        kept = set()
        manifests = list(manifests_here(local_dir(config)).values())
        manifests += every_manifest(storage, Seal.of(config))[0].values() if storage else []
        for manifest in manifests:
            if manifest.get("before", 0) == before:
                kept.add((manifest["step"], manifest.get("attempt", "")))
        return sorted(key for key in keys if key[0] < before or key in kept)
    counts = rewound(config, past)
    return sorted(key for key in keys if counts(*key))


def rewound(config: RunConfig, past: CheckpointHistory) -> Counts:
    """What counts of a run that goes back to before `checkpoint.before`: nothing from that step on, but what
    was made since it went back there."""
    before = config.checkpoint.before
    if not before or past.before == before:
        return past.counts
    return lambda step, attempt: step < before and past.counts(step, attempt)


class HeldAttempt(Protocol):
    """The right to write for a run (trainer/checkpoint/attempt.py)."""

    @property
    def record(self) -> AttemptRecord: ...

    @property
    def name(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    def goes_on_from(self, step: int) -> None: ...


class CheckpointCourse:
    """Which checkpoints count for one attempt while it makes its own.

    held: its right to write; None: a reader's, who sees what the newest attempt of `config` sees. config:
    None where no record is known, and every checkpoint counts.
    """

    def __init__(self, config: RunConfig | None, held: HeldAttempt | None) -> None:
        self.config = config
        self.held = held
        self._past: CheckpointHistory | None = None

    @property
    def past(self) -> CheckpointHistory:
        """The history so far. Raises StorageError where the store is away."""
        if self._past is None:
            if self.held is not None:
                self._past = history_from_record(self.held.record, self.held.epoch)
            else:
                self._past = history_of(self.config) if self.config else CheckpointHistory()
        return self._past

    def counts(self, step: int, attempt: str) -> bool:
        """Whether a checkpoint counts."""
        return self.past.counts(step, attempt)

    def go_on_from(self, step: int) -> None:
        """Notes the step that the attempt goes on from, once, before its first checkpoint. Raises
        AttemptFenced."""
        own = self.held is not None and self.past.attempt == self.held.name
        if self.held is None or not own or self.past.goes_on_from is not None:
            return
        self.held.goes_on_from(step)
        self._past = replace(self.past, goes_on_from=step)
