"""Where a run's checkpoints lie, by what right they are changed, how far they have come, and which step is
saved next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from trainer.checkpoint.attempt import Attempt
from trainer.checkpoint.course import CheckpointHistory, history_from_record, history_of
from trainer.checkpoint.layout import local_dir
from trainer.config import Checkpoint, RunConfig
from trainer.hardware.save_interval import save_interval_s
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError

MAX_FAILURES = 3
"""Checkpoints that may fail in a row before the run stops: it would continue unprotected."""


class CheckpointPlace:
    """The checkpoints of one run as this process may change them."""

    def __init__(
        self, config: RunConfig, storage: Storage | None, attempt: Attempt | None, say: Callable[[str], None]
    ) -> None:
        """storage: None where they are on this disk alone. attempt: the right to write for the run; None:
        there is none to lose (reading, tests of one writer)."""
        self.config, self.storage = config, storage
        self.attempt, self.say = attempt, say

    @property
    def folder(self) -> Path:
        return local_dir(self.config)

    @property
    def seal(self) -> Seal:
        return Seal.of(self.config)

    def check(self) -> None:
        """Raises AttemptFenced where a newer attempt has started."""
        if self.attempt:
            self.attempt.check()

    @cached_property
    def past(self) -> CheckpointHistory:
        """The history so far, as this attempt sees it, or else the newest. Raises StorageError where the
        store is away."""
        if self.attempt is None:
            return history_of(self.config)
        return history_from_record(self.attempt.record, self.attempt.epoch)

    def counts(self, step: int, attempt: str) -> bool:
        return self.past.counts(step, attempt)

    def go_on_from(self, step: int) -> None:
        """Notes the step that the attempt goes on from, once, before its first checkpoint. Raises
        AttemptFenced."""
        attempt, past = self.attempt, self.past
        if attempt is not None and past.attempt == attempt.name and past.goes_on_from is None:
            attempt.goes_on_from(step)
            self.past = replace(past, goes_on_from=step)


@dataclass
class CheckpointProgress:
    """The step of each checkpoint that is on its way, and of the newest that has arrived."""

    has_store: bool
    writing: int | None = None
    """Step that the ranks are writing."""
    uploading: int | None = None
    """Step that the ranks are uploading (or will, once it is written)."""
    committed: int | None = None
    """Newest step that a resume on this disk finds."""
    stored: int = 0
    """Newest step that this run knows to be committed in the store."""
    resumed_from: int = 0
    """Step of the checkpoint that the run goes on from; 0: there is none."""
    failures: int = 0
    failures_in_a_row: int = 0

    @property
    def busy(self) -> set[int | None]:
        return {self.writing, self.uploading}

    @property
    def safe(self) -> int:
        """Newest step that is committed where it has to be: in the store, or on the disk without one."""
        return self.stored if self.has_store else self.committed or 0

    def count_failure(self, error: object, say: Callable[[str], None]) -> None:
        """Tells and counts one. Raises StorageError after MAX_FAILURES in a row."""
        self.failures += 1
        self.failures_in_a_row += 1
        say(f"{error} ({self.failures_in_a_row} in a row)")
        if self.failures_in_a_row >= MAX_FAILURES:
            raise StorageError(
                f"{self.failures_in_a_row} checkpoints in a row failed, the last with: {error}"
            )


class SaveSchedule:
    """What the last checkpoint took, and so which step is saved next."""

    def __init__(self, config: Checkpoint, say: Callable[[str], None]) -> None:
        self.config = config
        self._say = say
        self.write_s = 0.0
        """Seconds that the ranks needed to write the last checkpoint."""
        self.save_s = 0.0
        """The same, together with the seconds of the upload where there is a store."""
        self.stall_s = 0.0
        """Seconds that training stood still for the last checkpoint."""
        self.checkpoint_bytes = 0
        """Size of the last checkpoint, over all nodes."""
        self.interval_steps = max(1, config.every_steps)
        self.last_begun = 0
        """Step of the last checkpoint that was begun or resumed from."""
        self.repeats = False
        """Whether the last one failed, so that the next step is saved."""

    def begin(self, step: int) -> None:
        self.last_begun = step
        self.repeats = False

    def wants(self, step: int, step_time_s: float, last: bool) -> bool:
        """Whether to save after `step`, as far as time goes. With every_steps 0 the first step is saved, to
        measure, and then as Daly's formula says. last: the run ends."""
        if last or self.repeats:
            return step != self.last_begun or self.repeats
        if self.config.every_steps == 0 and step_time_s > 0:
            if self.last_begun == 0 or self.save_s == 0:
                return step != self.last_begun
            self._adapt(step_time_s)
        if step - self.last_begun >= self.interval_steps:
            return True
        return step % self.interval_steps == 0 and step != self.last_begun

    def _adapt(self, step_time_s: float) -> None:
        """Sets the interval by what the last save cost, where that changes it by more than a quarter."""
        mtbf_s = self.config.mean_time_between_preemptions_s
        wanted_s = max(save_interval_s(max(self.stall_s, 0.001), mtbf_s), self.save_s)
        steps = max(1, round(wanted_s / step_time_s))
        if abs(steps - self.interval_steps) > 0.25 * self.interval_steps:
            self._say(
                f"saving every {steps} steps ({steps * step_time_s:.0f} s): a save stalls"
                f" {self.stall_s:.2f} s and commits after {self.save_s:.1f} s, one preemption in"
                f" {mtbf_s:.0f} s"
            )
            self.interval_steps = steps

    def fits(self, remaining_s: float, writes: int) -> bool:
        """Whether so many checkpoints would be written in the time that remains. What has not been measured
        is tried: nothing is lost by a save that the kill cuts off."""
        return writes * 1.3 * self.write_s + 0.5 < remaining_s

    def metrics(self) -> dict[str, float]:
        """Figures of the last checkpoint; they may differ between equal runs."""
        return {
            "perf/checkpoint_save_s": self.save_s,
            "perf/checkpoint_stall_s": self.stall_s,
            "perf/checkpoint_gib": self.checkpoint_bytes / 2**30,
            "perf/checkpoint_interval_steps": float(self.interval_steps),
        }
