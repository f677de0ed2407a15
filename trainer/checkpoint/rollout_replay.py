"""What a restart replays: steps that are logged, of one history."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from trainer.algorithm.traces import Trace
from trainer.checkpoint.errors import CorruptCheckpoint
from trainer.checkpoint.rollout_archive import DAMAGED, GradedStep
from trainer.checkpoint.rollout_place import LogCopy, LoggedSteps, LogPlace, log_files, log_objects
from trainer.config import Checkpoint, ConfigError
from trainer.system.errors import StorageError


class RolloutReplay:
    """The logged steps after the one that a run goes on from."""

    def __init__(self, place: LogPlace, logged: LoggedSteps, settings: Checkpoint) -> None:
        self._place, self._logged = place, logged
        self._settings = settings
        self.completions = 0
        """Completions that were read so far, and so not sampled again."""
        self._step = 0
        """The one that the run goes on from."""
        self._needed: Sequence[int] = ()
        self._copies: dict[int, list[LogCopy]] = {}
        """Where the log of each step that can be replayed lies."""
        self._ready: dict[int, GradedStep] = {}
        """The steps whose logs belong to the checkpoint."""

    def open(self, step: int, needed: Sequence[int] = ()) -> list[int]:
        """Looks for the steps after `step` that can be replayed; returns them.

        They are those of one history: of each step the newest attempt's, and never an older attempt's after a
        newer one's, which would be an attempt that went on beside the one that had replaced it.

        needed: first steps after `step`, or `step` itself, whose logs belong to its checkpoint. They are read
        at once, also those that an older version of the code wrote. Raises CorruptCheckpoint where one cannot
        be read.
        """
        self._step, self._needed = step, needed
        self._copies = {}
        self._ready = {}
        at = min([step + 1, *needed])
        copies = self._find_copies(at - 1) if self._settings.resume != "never" else {}
        # A run that goes back samples again: what it goes back behind may be what the engine sampled.
        replays = not self._settings.before
        epoch = 0
        while at in copies and (replays or at in needed):
            newest = max(copy.epoch for copy in copies[at])
            if newest < epoch and at not in needed:
                break
            self._copies[at] = [copy for copy in copies[at] if copy.epoch == newest]
            epoch = max(epoch, newest)
            at += 1
        for ahead in needed:
            try:
                self._ready[ahead] = self._load(ahead)
            except (*DAMAGED, StorageError, ConfigError) as error:
                raise CorruptCheckpoint(
                    f"checkpoint of step {step}: the completions of step {ahead}, which older weights sampled"
                    f" before it, cannot be read ({error})"
                ) from error
        if at > step + 1:
            steps = f"steps {step + 1} to {at - 1}"
            self._place.say(f"{steps} are replayed: their completions are not sampled again")
        return list(range(step + 1, at))

    def waiting(self) -> Sequence[Trace]:
        """What the rollout phase of the checkpoint's step had sampled of later steps; empty where nothing
        is carried over."""
        graded = self._ready.pop(self._step, None)
        return graded.waiting if graded else ()

    def read(self, step: int) -> GradedStep | None:
        """The graded completions of a step that can be replayed; None: sample them."""
        graded = self._ready.pop(step, None)
        if graded is None and step in self._copies:
            try:
                graded = self._load(step)
            except (*DAMAGED, StorageError, ConfigError) as error:
                self._copies.clear()  # what follows was sampled after this one
                self._logged.failed(
                    f"step {step} cannot be replayed ({error}): its completions are sampled again"
                )
        self.completions += len(graded.traces) if graded else 0
        return graded

    def _find_copies(self, after: int) -> dict[int, list[LogCopy]]:
        """Where the logs of the steps after `after` lie: this disk's first."""
        place = self._place
        copies: dict[int, list[LogCopy]] = {}
        for step, path in log_files(place.folder):
            if step > after:
                with contextlib.suppress(*DAMAGED), np.load(path, allow_pickle=False) as archive:
                    epoch = place.header(archive, step, self._needed)["epoch"]
                    copies.setdefault(step, []).append(LogCopy(epoch))
        try:
            for step, attempt, key in log_objects(place.storage):
                if step > after and place.may_have_written(key):
                    copies.setdefault(step, []).append(LogCopy(attempt, key))
        except (StorageError, ConfigError) as error:
            self._logged.failed(error)
        return copies

    def _load(self, step: int) -> GradedStep:
        """The log of a step, from the first of its copies that is whole. Raises what the last one raised."""
        wrong: Exception = ValueError("there is none")
        for copy in self._copies.pop(step, ()):
            try:
                about, graded = self._place.load(copy, step, self._needed)
            except (*DAMAGED, StorageError, ConfigError) as error:
                wrong = error
                continue
            self._logged.durable.add(step)
            attempt = about.get("attempt", self._place.attempt_name)
            self._logged.sampled_by[step] = about["epoch"], attempt
            if copy.key:
                self._logged.stored.add(step)
            return graded
        raise wrong
