"""The rollout log: a step's graded completions, durable before its update: a restart samples none of them
again.

    <run.dir>/rollouts/step-00000021.npz                      written before the update of step 21
    <remote>/<run id>/rollouts/step-00000021/7-3f2c1a.npz     sent beside it, under its attempt's name

A restart from step 20 replays what is logged of 21, 22, ...: same token ids, log-probabilities and outcomes,
so same updates, bit for bit. With `rollout.staleness` k the steps 21 to 20 + k were sampled by weights that
the checkpoint of step 20 does not hold: their logs belong to it, and it is committed after them. Where
completions are carried over, the log of step 20 also has what its rollout phase sampled of the steps 21 to
20 + k, and belongs to that checkpoint itself. Files are plain NumPy archives without pickles; the CRC of
every array is compared on reading. Those in the store of a run with a key are signed, for their step and
attempt (trainer/storage/seal.py).
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.algorithm.traces import Trace
from trainer.checkpoint.attempt import Attempt, AttemptFenced
from trainer.checkpoint.format import write_file
from trainer.checkpoint.layout import step_name
from trainer.checkpoint.manifest import CheckpointError, CorruptCheckpoint, code_fingerprint
from trainer.checkpoint.rollout_archive import (
    DAMAGED,
    FORMAT,
    SECOND_FORMAT,
    GradedStep,
    archive_of,
    graded_of,
)
from trainer.config import ConfigError, RunConfig, fingerprint
from trainer.config.run_store import ROLLOUTS, RunStore
from trainer.storage.attempt_record import attempt_number
from trainer.storage.seal import ForgedObject, Seal
from trainer.storage.storage import Storage
from trainer.storage.stores import RetryPolicy
from trainer.system.errors import StorageError

RETRY = RetryPolicy(attempts=2)
"""The log saves work and guards none: a store that is away costs the restart its sampling, nothing else."""


def _say(text: str) -> None:
    print(f"rollout log: {text}", file=sys.stderr, flush=True)


OBJECT = re.compile(r"step-(\d{8})/((\d+)-[0-9a-f]{6})\.npz")
"""Key of a step's log in the store: (step, attempt, its number)."""
LOCAL = re.compile(r"step-(\d{8})\.npz")


@dataclass(frozen=True)
class LogCopy:
    """One of the files that hold the log of a step."""

    epoch: int
    key: str = ""
    """In the store; empty for the file of the run's folder."""


@dataclass(frozen=True)
class LogPlace:
    """The rollout log of one run as this process may read and write it."""

    folder: Path
    storage: Storage | None
    seal: Seal
    attempt: Attempt | None
    """The right to write for the run; None: there is none to lose."""
    about: dict[str, Any]
    """What is alike in every log of this attempt: format, run, configuration, data, code."""
    say: Callable[[str], None]

    @property
    def epoch(self) -> int:
        return self.attempt.epoch if self.attempt else 0

    @property
    def attempt_name(self) -> str:
        return self.attempt.name if self.attempt else "0-000000"

    def path(self, step: int) -> Path:
        return self.folder / f"{step_name(step)}.npz"

    def header(self, archive: Any, step: int, needed: Collection[int] = ()) -> dict[str, Any]:
        """What a log says of itself. Raises ValueError where it is of another run, configuration, dataset or
        code; of what a checkpoint needs, configuration and dataset were compared with the checkpoint's."""
        about = json.loads(archive["about"].tobytes())
        expected = self.about | {"step": step}
        if step in needed:
            expected = {key: expected[key] for key in ("run_id", "step")}
            if about["format"] not in (FORMAT, SECOND_FORMAT):
                raise ValueError("its format is another")
        for key, value in expected.items():
            if about[key] != value:
                raise ValueError(f"its {key} is another")
        return about

    def load(self, copy: LogCopy, step: int, needed: Collection[int]) -> tuple[dict[str, Any], GradedStep]:
        """A step's log, and what it says of itself. Raises one of DAMAGED, StorageError, ConfigError."""
        source: Any = self.path(step)
        if copy.key and self.storage:
            data = self.storage.get_bytes(copy.key)
            self.seal.check_archive(f"{ROLLOUTS}/{copy.key}", data)
            source = io.BytesIO(data)
        with np.load(source, allow_pickle=False) as archive:
            about = self.header(archive, step, needed)
            return about, graded_of(about, dict(archive))

    def copies(self, after: int, needed: Collection[int]) -> Iterator[tuple[int, LogCopy]]:
        """(step, copy) of the logs of the steps after `after`: this disk's first. Raises StorageError,
        ConfigError."""
        for path in self.folder.glob("step-*.npz"):
            match = LOCAL.fullmatch(path.name)
            if match is not None and (step := int(match[1])) > after:
                with contextlib.suppress(*DAMAGED), np.load(path, allow_pickle=False) as archive:
                    yield step, LogCopy(self.header(archive, step, needed)["epoch"])
        for step, copy in self.in_store():
            if step > after and self.may_have_written(copy.key):
                yield step, copy

    def in_store(self) -> Iterator[tuple[int, LogCopy]]:
        for key, _ in self.storage.list() if self.storage else ():
            match = OBJECT.fullmatch(key)
            if match is not None:
                yield int(match[1]), LogCopy(int(match[3]), key)

    def may_have_written(self, key: str) -> bool:
        """Whether an attempt of this run may have written an object: a stranger's, under a number that is the
        newest, would hide those of the run."""
        if not self.seal or self.attempt is None:
            return True
        name = key.rpartition("/")[2].removesuffix(".npz")
        begun = self.attempt.record.read(attempt_number(name))
        if begun is not None and begun.name == name:
            return True
        with contextlib.suppress(ForgedObject):
            self.seal.refuse(f"{ROLLOUTS}/{key}", "is of an attempt that there was not")
        return False


@dataclass
class LoggedSteps:
    """The steps whose logs this process has seen, read or written."""

    say: Callable[[str], None]
    durable: set[int] = field(default_factory=set)
    """Those whose log lies on this disk or in the store."""
    stored: set[int] = field(default_factory=set)
    """Those whose log lies in the store."""
    unwritten: dict[int, str] = field(default_factory=dict)
    """Those whose log could not be written, and why."""
    sampled_by: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Epoch and attempt that sampled a step which this one replays."""
    failures: int = 0

    def failed(self, error: object) -> None:
        """Tells and counts what a log could not do; the run goes on."""
        self.failures += 1
        self.say(str(error))


class RolloutLog:
    """The log of one run, in the driver: what a restart replays of it, and what is added. Uploads run beside
    training; what fails is told and counted, never raised."""

    def __init__(
        self,
        config: RunConfig,
        data_fingerprint: str = "",
        *,
        attempt: Attempt | None = None,
        storage: Storage | None = None,
        say: Callable[[str], None] = _say,
    ):
        """attempt: the right to write for this run, as in `Checkpoints`."""
        store = RunStore.of(config)
        if store and not storage:
            storage = Storage(store.rollouts, retry=RETRY)
        about = {
            "format": FORMAT,
            "run_id": config.run_id,
            "fingerprint": fingerprint(config),
            "data_fingerprint": data_fingerprint,
            "code_fingerprint": code_fingerprint(),
        }
        folder = Path(RunStore.at_run_folder(config).rollouts)
        self.place = LogPlace(folder, storage, Seal.of(config), attempt, about, say)
        self._logged = LoggedSteps(say)
        self._settings = config.checkpoint
        self._keeps = config.logging.keep_rollouts
        self._goes_on_from_logs = config.carries_over
        self._floor = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollout-log")
        self._completions = 0
        """Completions that were read so far, and so not sampled again."""
        self._step = 0
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
            self.place.say(f"{steps} are replayed: their completions are not sampled again")
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
        self._completions += len(graded.traces) if graded else 0
        return graded

    def write(self, step: int, graded: GradedStep, floor: int = 0) -> None:
        """Makes a step's completions durable here, and sends them to the store beside what follows; once more
        when a teacher has judged them. What an earlier attempt had sampled stays its own. floor: oldest step
        that a restart may go on from; what is logged up to it is dropped, here and there, unless the run
        keeps all of it (`logging.keep_rollouts`), or a checkpoint of that step needs its log."""
        place, logged = self.place, self._logged
        floor = 0 if self._keeps else floor - self._goes_on_from_logs
        epoch, attempt = place.epoch, place.attempt_name
        if graded.teacher is not None:
            epoch, attempt = logged.sampled_by.get(step, (epoch, attempt))
        about: dict[str, Any] = place.about | {"step": step, "stats": graded.stats}
        about |= {"epoch": epoch, "attempt": attempt}
        try:
            place.folder.mkdir(parents=True, exist_ok=True)
            write_file(place.path(step), [archive_of(about, graded)])
        except OSError as error:
            logged.unwritten[step] = str(error)
            logged.failed(f"step {step} is not logged: {error}")
            return
        logged.durable.add(step)
        rises = floor > self._floor
        if rises:
            for path in place.folder.glob("step-*.npz"):
                match = LOCAL.fullmatch(path.name)
                if match is not None and int(match[1]) <= floor:
                    path.unlink(missing_ok=True)
        logged.stored.discard(step)
        if place.storage:
            self._pool.submit(self._send, place.storage, step, floor if rises else 0)
        self._floor = max(self._floor, floor)

    def _send(self, storage: Storage, step: int, floor: int = 0) -> None:
        place, logged = self.place, self._logged
        try:
            if place.attempt:
                place.attempt.check()
            if step not in logged.stored:
                data = place.path(step).read_bytes()
                with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                    about = json.loads(archive["about"].tobytes())
                key = f"{step_name(step)}/{about.get('attempt', place.attempt_name)}.npz"
                storage.put_bytes(key, place.seal.signed_archive(f"{ROLLOUTS}/{key}", data))
                logged.stored.add(step)
            if floor:
                storage.delete([copy.key for older, copy in place.in_store() if older <= floor])
        except (FileNotFoundError, AttemptFenced):
            # The file was dropped meanwhile, or the attempt is over, which the next commit says.
            return
        except (StorageError, ConfigError, OSError) as error:
            logged.failed(f"step {step} is logged on this disk only: {error}")

    # --- what a checkpoint rests on -------------------------------------------------------------------------

    def durable(self, steps: Sequence[int]) -> bool:
        """Whether the logs of all these steps lie on this disk or in the store. Raises CheckpointError where
        one could not be written: a checkpoint that needs it has failed."""
        logged = self._logged
        for step in steps:
            if step in logged.unwritten and step not in logged.durable:
                raise CheckpointError(
                    f"the rollout log of step {step} is not there: {logged.unwritten[step]}"
                )
        return logged.durable.issuperset(steps)

    def make_durable(self, steps: Sequence[int]) -> None:
        """Waits until the store has the logs of these steps; those that it lacks are sent once more. Raises
        StorageError."""
        storage = self.place.storage
        assert storage is not None
        for step in steps:
            self._pool.submit(self._send, storage, step).result()  # behind what is being sent
            if step not in self._logged.stored and not dict(storage.list(step_name(step))):
                raise StorageError(f"the rollout log of step {step}, sampled ahead, is not in the store")

    def _find_copies(self, after: int) -> dict[int, list[LogCopy]]:
        """Where the logs of the steps after `after` lie."""
        copies: dict[int, list[LogCopy]] = {}
        try:
            for step, copy in self.place.copies(after, self._needed):
                copies.setdefault(step, []).append(copy)
        except (StorageError, ConfigError) as error:
            self._logged.failed(error)
        return copies

    def _load(self, step: int) -> GradedStep:
        """The log of a step, from the first of its copies that is whole. Raises what the last one raised."""
        wrong: Exception = ValueError("there is none")
        for copy in self._copies.pop(step, ()):
            try:
                about, graded = self.place.load(copy, step, self._needed)
            except (*DAMAGED, StorageError, ConfigError) as error:
                wrong = error
                continue
            self._logged.durable.add(step)
            attempt = about.get("attempt", self.place.attempt_name)
            self._logged.sampled_by[step] = about["epoch"], attempt
            if copy.key:
                self._logged.stored.add(step)
            return graded
        raise wrong

    def metrics(self) -> dict[str, float]:
        return {
            "perf/replayed_completions": float(self._completions),
            "perf/rollout_log_failures": float(self._logged.failures),
        }

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
