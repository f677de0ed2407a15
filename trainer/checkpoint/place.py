"""Where a run's checkpoints lie, by what right they are changed, how far they have come, and which step is
saved next, and which stay."""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.checkpoint.attempt import Attempt
from trainer.checkpoint.course import CheckpointHistory, history_from_record, history_of
from trainer.checkpoint.layout import MANIFEST, CheckpointKey, local_dir, step_name, step_of
from trainer.checkpoint.manifest import (
    Manifests,
    every_manifest,
    manifests_here,
    manifests_there,
    newest_of_each,
    unpack,
)
from trainer.checkpoint.writer import disk_room
from trainer.config import Checkpoint, ConfigError, RunConfig
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


# --- which stay ---------------------------------------------------------------------------------------------
# The newest and the best, here and in the store, and never the last whole one. What is dropped is what this
# run wrote: folders named `step-` and eight digits, without another run's manifest, and in the store the
# objects of a checkpoint there. Whatever else lies beside them is a person's.


@dataclass(frozen=True)
class Keep:
    """How many checkpoints stay, by what they are."""

    last: int
    best: int
    good: int = 0
    """Newest ones from before the trouble, while there is any."""
    trouble: int = 0
    """Step of the first alarm of a guard that lasts; 0: there is none."""

    def sound(self, steps: Iterable[int]) -> set[int]:
        """The steps from before the trouble that stay; none while there is no trouble."""
        if not self.good:
            return set()
        before = sorted(step for step in steps if step < self.trouble)
        return set(before[-self.good :])


def steps_to_keep(manifests: Manifests, keep: Keep, safe: int) -> set[int]:
    """Steps that stay: the `last` newest of all, the `last` newest up to `safe`, the `best` by held-out
    score, and those from before the trouble. safe: newest step that the store has. What came after it does
    not count against what came before, so that an old checkpoint goes only after the new one is committed in
    the store, however long that is away."""
    steps = sorted(manifests)
    settled = steps[: bisect_right(steps, safe)]
    newest = set(steps[-keep.last :]) | set(settled[-keep.last :])

    scored = [
        (manifest["score"], manifest["step"])
        for manifest in manifests.values()
        if manifest["score"] is not None
    ]
    best = sorted(scored, reverse=True)[: keep.best]
    return newest | {step for _, step in best} | keep.sound(steps)


OBJECT = re.compile(r"(step-\d{8})/(?:(\d+-[0-9a-f]{6})/)?([A-Za-z0-9_.-]+)")
"""Key of an object of a checkpoint: step, attempt, file."""
OWN_FILE = re.compile(r"(manifest|state)\.json|(metrics|samples)\.jsonl|\.?rank-\d{5}-of-\d{5}\..*")
"""Files that the trainer writes into a checkpoint, besides those that its manifest lists."""


def _is_own(name: str, manifest: dict[str, Any] | None) -> bool:
    """Whether a file in a checkpoint's folder is the trainer's; all others are a person's. manifest: the
    folder's, if it has one."""
    name = name.removesuffix(".sha256")
    return OWN_FILE.fullmatch(name) is not None or any(
        entry["name"] == name for entry in (manifest or {}).get("files", ())
    )


def drop(folder: Path) -> None:
    """Removes one checkpoint, its manifest first. What a person put into its folder stays there."""
    manifest = None
    with contextlib.suppress(OSError):
        manifest = unpack((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").unlink(missing_ok=True)
    for path in folder.iterdir() if folder.is_dir() else ():
        if _is_own(path.name, manifest) or path.name.startswith("."):  # a file that a kill left half written
            with contextlib.suppress(OSError):
                path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


class Retention:
    """Drops what need not stay of one run's checkpoints, as newer ones are committed."""

    def __init__(self, place: CheckpointPlace, progress: CheckpointProgress) -> None:
        self._place, self._progress = place, progress
        self._settings = place.config.checkpoint
        self.trouble = 0
        """Step of the first alarm of a guard that lasts; 0: none. The loop sets it."""
        kept = max(self._settings.keep_last, self._settings.keep_last_remote)
        self._commits: deque[int] = deque(maxlen=kept)

    def committed(self, step: int) -> None:
        self._commits.append(step)

    def resumed(self, step: int, *, committed: bool) -> None:
        """Begins anew with the checkpoint that the run goes on from."""
        self._commits.clear()
        if committed:
            self._commits.append(step)

    @property
    def floor(self) -> int:
        """Oldest step that `keep_last` and `keep_last_remote` keep for a resume; 0: none."""
        return self._commits[0] if len(self._commits) == self._commits.maxlen else 0

    def local_steps(self) -> list[int]:
        """Steps of the committed local checkpoints: what the writers of the ranks must keep."""
        return sorted(manifests_here(self._place.folder, self._place.counts))

    def from_before_the_trouble(self) -> int:
        """Newest checkpoint of this run from before the first alarm, here or in the store; 0: there is none,
        or no trouble."""
        steps = set(self.local_steps())
        if self._place.storage:
            counts = self._place.counts
            steps |= manifests_there(self._place.storage, counts, self._place.seal)[0].keys()
        return max((step for step in steps if step < self.trouble), default=0)

    def make_room(self, wanted: int) -> int:
        """Drops local checkpoints but the newest, oldest first and those from before the trouble last, while
        `wanted` bytes do not fit. Returns the room; where that is not enough the writers refuse, with the
        figures."""
        folder = self._place.folder
        spared = self._keep(0).sound(manifests_here(folder))
        free = disk_room(folder, self._settings.max_disk_gib)
        while free < wanted:
            older = sorted(manifests_here(folder))[:-1]
            idle = [step for step in older if step != self._progress.uploading]
            if not idle:
                break
            oldest = min(idle, key=lambda step: (step in spared, step))
            self._place.say(
                f"dropping the local checkpoint of step {oldest} early: the disk budget needs its room"
            )
            drop(folder / step_name(oldest))
            free = disk_room(folder, self._settings.max_disk_gib)
        return free

    def prune_local(self) -> None:
        """Drops local checkpoints that need not stay, that do not count, and what no manifest ever
        followed."""
        place, progress = self._place, self._progress
        own = {}
        left_behind = set()
        theirs = set()
        for step, manifest in manifests_here(place.folder).items():
            if manifest["run_id"] != place.config.run_id:
                theirs.add(step)
            elif place.counts(step, manifest.get("attempt", "")):
                own[step] = manifest
            else:
                left_behind.add(step)

        wanted = self._keep(self._settings.keep_last)
        keep = steps_to_keep(own, wanted, max(progress.safe, progress.resumed_from)) | theirs | progress.busy
        newest = max(own, default=0)
        for path in place.folder.glob("step-*"):
            step = step_of(path.name)
            if step is not None and step not in keep and (step <= newest or step in left_behind):
                drop(path)

    def prune_remote(self, storage: Storage) -> None:
        """The same in the store: of a step that stays, what other attempts left of it goes too. Of a run
        with a key nothing goes for a checkpoint that a stranger wrote."""
        place, counts = self._place, self._place.counts
        with tidying("older checkpoints", place.say):
            manifests, sizes = every_manifest(storage, place.seal)
            own = {}
            theirs = set()
            for key, manifest in manifests.items():
                if manifest["run_id"] != place.config.run_id:
                    theirs.add(key)
                elif counts(*key):
                    own[key] = manifest
            newest_of_step = newest_of_each(own)
            foreign_steps = {step for step, _ in theirs} - newest_of_step.keys()
            newest = max(newest_of_step, default=0)
            keep = steps_to_keep(newest_of_step, self._keep(self._settings.keep_last_remote), newest)

            folders: dict[CheckpointKey, list[str]] = {}
            for match in filter(None, map(OBJECT.fullmatch, sizes)):
                folder = (step_of(match[1]) or 0, match[2] or "")
                if _is_own(match[3], manifests.get(folder)):
                    folders.setdefault(folder, []).append(match[0])
            for (step, attempt), keys in folders.items():
                stays = step in keep and attempt == newest_of_step[step].get("attempt", "")
                stays = stays or step in foreign_steps or (step, attempt) in theirs
                if stays or step in self._progress.busy:
                    continue
                if step <= newest or not counts(step, attempt):
                    _delete_checkpoint(storage, place, keys)

    def withdraw(self, storage: Storage, steps: Collection[int]) -> None:
        """Takes back the manifests of checkpoints in the store that were passed over."""
        with tidying(f"the checkpoints of steps {sorted(steps)}, which were passed over,", self._place.say):
            unusable = []
            for key, _ in storage.list():
                match = MANIFEST.fullmatch(key)
                if match is not None and step_of(match[1]) in steps:
                    unusable.append(key)
            self._place.check()
            storage.delete(unusable)

    def _keep(self, last: int) -> Keep:
        """What stays besides the `last` newest checkpoints."""
        return Keep(last, self._settings.keep_best, self._settings.keep_good, self.trouble)


def _delete_checkpoint(storage: Storage, place: CheckpointPlace, keys: Collection[str]) -> None:
    """Deletes a checkpoint, its manifest first: from then on it is none. Raises AttemptFenced."""
    place.check()
    storage.delete([key for key in keys if key.endswith("/manifest.json")])
    storage.delete(keys)


@contextmanager
def tidying(objects: str, say: Callable[[str], Any]) -> Generator[None]:
    """Tells, and no more, where a store refuses a deletion: what counts is not decided by what is gone."""
    try:
        yield
    except (ConfigError, StorageError) as error:
        say(f"{objects} stay in the store, which they fill: {error}")
