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
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from trainer.algorithm.traces import Outcome, Trace, completed_trace
from trainer.checkpoint.attempt import Attempt, AttemptFenced
from trainer.checkpoint.errors import CheckpointError, CorruptCheckpoint
from trainer.checkpoint.format import write_file
from trainer.checkpoint.layout import step_name
from trainer.checkpoint.manifest import code_fingerprint
from trainer.checkpoint.trace_columns import cut_pieces, prompts_of, text_array, trace_columns, traces_of
from trainer.config import ConfigError, RunConfig, fingerprint
from trainer.config.run_store import ROLLOUTS, RunStore
from trainer.storage.seal import OPEN, ForgedObject, Seal
from trainer.storage.storage import Storage
from trainer.storage.stores import RetryPolicy
from trainer.system.errors import StorageError

OBJECT = re.compile(r"step-(\d{8})/((\d+)-[0-9a-f]{6})\.npz")
"""Key of a step's log in the store: (step, attempt, its number)."""
LOCAL = re.compile(r"step-(\d{8})\.npz")
FORMAT = "spotrl-rollout-3"
SECOND_FORMAT, FIRST_FORMAT = "spotrl-rollout-2", "spotrl-rollout-1"
WAITING = "waiting_"
"""What the columns of completions of later steps begin with."""
DAMAGED = (OSError, ValueError, LookupError, EOFError, TypeError, zipfile.BadZipFile)
"""What reading an archive raises that is not whole, or is none."""
RETRY = RetryPolicy(attempts=2)
"""The log saves work and guards none: a store that is away costs the restart its sampling, nothing else."""


@dataclass(frozen=True)
class GradedStep:
    """A step's completions, in the order of the loop, with what the grader said of each."""

    traces: list[Trace]
    outcomes: list[Outcome]
    stats: dict[str, float]
    """The grader's metrics of the batch."""
    teacher: list[np.ndarray] | None = None
    """Log-probabilities of the learned tokens under the teacher, [T] float32 per trace, [0] of traces that
    are not trained on; None: not asked yet."""
    waiting: Sequence[Trace] = ()
    """Completions of later steps, so far, where they are carried over. Their groups count on from the step's:
    with P prompts a step, group P is the first of the next step."""


@dataclass(frozen=True)
class _Place:
    epoch: int
    """Number of the attempt that sampled it."""
    key: str = ""
    """In the store; empty for the file of the run's folder."""


def _say(text: str) -> None:
    print(f"rollout log: {text}", file=sys.stderr, flush=True)


class RolloutLog:
    """The log of one run, in the driver. Uploads run beside training; what fails is told and counted, never
    raised."""

    def __init__(
        self,
        config: RunConfig,
        data_fingerprint: str = "",
        *,
        held: Attempt | None = None,
        storage: Storage | None = None,
        say: Callable[[str], None] = _say,
    ):
        """held: the right to write for this run, as in `Checkpoints`."""
        self._say = say
        self._held = held
        self._seal = Seal.of(config)
        self._resumes = config.checkpoint.resume != "never"
        # A run that goes back samples again: what it goes back behind may be what the engine sampled.
        self._replays = not config.checkpoint.before
        self._keeps = config.logging.keep_rollouts
        self._goes_on_from_logs = config.carries_over
        self.folder = Path(RunStore.at_run_folder(config).rollouts)
        store = RunStore.of(config)
        self.storage = storage
        if store and not storage:
            self.storage = Storage(store.rollouts, retry=RETRY)
        self._about = {
            "format": FORMAT,
            "run_id": config.run_id,
            "fingerprint": fingerprint(config),
            "data_fingerprint": data_fingerprint,
            "code_fingerprint": code_fingerprint(),
        }
        self.replayed = 0
        self.failures = 0
        self._usable: dict[int, list[_Place]] = {}
        self._opened_at = 0
        self._needed: Sequence[int] = ()
        self._ready: dict[int, GradedStep] = {}
        self._sampled_by: dict[int, tuple[int, str]] = {}
        """Epoch and attempt that sampled a step which this one replays."""
        self._durable: set[int] = set()
        """Steps whose log lies on this disk or in the store."""
        self._stored: set[int] = set()
        """Steps whose log lies in the store, as far as this attempt has seen."""
        self._unwritten: dict[int, str] = {}
        """Steps whose log could not be written, and why."""
        self._floor = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollout-log")

    @property
    def _epoch(self) -> int:
        return self._held.epoch if self._held else 0

    @property
    def _attempt(self) -> str:
        return self._held.name if self._held else "0-000000"

    # --- replaying ------------------------------------------------------------------------------------------

    def open(self, step: int, needed: Sequence[int] = ()) -> list[int]:
        """Looks for the steps after `step` that can be replayed; returns them.

        They are those of one history: of each step the newest attempt's, and never an older attempt's after a
        newer one's, which would be an attempt that went on beside the one that had replaced it.

        needed: first steps after `step`, or `step` itself, whose logs belong to its checkpoint. They are read
        at once, also those that an older version of the code wrote. Raises CorruptCheckpoint where one cannot
        be read.
        """
        self._opened_at, self._needed = step, needed
        self._usable = {}
        self._ready = {}
        at = min([step + 1, *needed])
        found = self._places(at - 1) if self._resumes else {}
        epoch = 0
        while at in found and (self._replays or at in needed):
            newest = max(place.epoch for place in found[at])
            if newest < epoch and at not in needed:
                break
            self._usable[at] = [place for place in found[at] if place.epoch == newest]
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
            self._say(f"steps {step + 1} to {at - 1} are replayed: their completions are not sampled again")
        return list(range(step + 1, at))

    def waiting(self) -> Sequence[Trace]:
        """What the rollout phase of the checkpoint's step had sampled of later steps; empty where nothing
        is carried over."""
        graded = self._ready.pop(self._opened_at, None)
        return graded.waiting if graded else ()

    def _places(self, after: int) -> dict[int, list[_Place]]:
        """Where the logs of the steps after `after` lie: this disk's first."""
        found: dict[int, list[_Place]] = {}
        for step, path in _files(self.folder):
            if step > after:
                with contextlib.suppress(*DAMAGED), np.load(path, allow_pickle=False) as archive:
                    epoch = self._header(archive, step)["epoch"]
                    found.setdefault(step, []).append(_Place(epoch))
        try:
            for step, attempt, key in _objects(self.storage):
                if step > after and self._may_have_written(key):
                    found.setdefault(step, []).append(_Place(attempt, key))
        except (StorageError, ConfigError) as error:
            self._failed(error)
        return found

    def _may_have_written(self, key: str) -> bool:
        """Whether an attempt of this run may have written an object: a stranger's, under a number that is the
        newest, would hide those of the run."""
        if not self._seal or self._held is None:
            return True
        attempt = key.rpartition("/")[2].removesuffix(".npz")
        begun = self._held.record.read(_epoch(attempt))
        if begun is not None and begun.name == attempt:
            return True
        with contextlib.suppress(ForgedObject):
            self._seal.refuse(f"{ROLLOUTS}/{key}", "is of an attempt that there was not")
        return False

    def read(self, step: int) -> GradedStep | None:
        """The graded completions of a step that can be replayed; None: sample them."""
        graded = self._ready.pop(step, None)
        if graded is None and step in self._usable:
            try:
                graded = self._load(step)
            except (*DAMAGED, StorageError, ConfigError) as error:
                self._usable.clear()  # what follows was sampled after this one
                self._failed(f"step {step} cannot be replayed ({error}): its completions are sampled again")
        self.replayed += len(graded.traces) if graded else 0
        return graded

    def _load(self, step: int) -> GradedStep:
        """The log of a step, from the first of its places that is whole. Raises what the last one raised."""
        wrong: Exception = ValueError("there is none")
        for place in self._usable.pop(step, ()):
            try:
                source: Any = self.folder / f"{step_name(step)}.npz"
                if place.key and self.storage:
                    data = self.storage.get_bytes(place.key)
                    self._seal.check_archive(f"{ROLLOUTS}/{place.key}", data)
                    source = io.BytesIO(data)
                with np.load(source, allow_pickle=False) as archive:
                    about = self._header(archive, step)
                    graded = _graded(about, dict(archive))
            except (*DAMAGED, StorageError, ConfigError) as error:
                wrong = error
                continue
            self._durable.add(step)
            self._sampled_by[step] = about["epoch"], about.get("attempt", self._attempt)
            if place.key:
                self._stored.add(step)
            return graded
        raise wrong

    def _header(self, archive: Any, step: int) -> dict[str, Any]:
        """What a log says of itself. Raises ValueError where it is of another run, configuration, dataset or
        code; of what a checkpoint needs, configuration and dataset were compared with the checkpoint's."""
        about = json.loads(archive["about"].tobytes())
        expected = self._about | {"step": step}
        if step in self._needed:
            expected = {key: expected[key] for key in ("run_id", "step")}
            if about["format"] not in (FORMAT, SECOND_FORMAT):
                raise ValueError("its format is another")
        for key, value in expected.items():
            if about[key] != value:
                raise ValueError(f"its {key} is another")
        return about

    # --- writing --------------------------------------------------------------------------------------------

    def write(self, step: int, graded: GradedStep, floor: int = 0) -> None:
        """Makes a step's completions durable here, and sends them to the store beside what follows; once more
        when a teacher has judged them. What an earlier attempt had sampled stays its own.

        floor: oldest step that a restart may go on from; what is logged up to it is dropped, here and there,
        unless the run keeps all of it (`logging.keep_rollouts`), or a checkpoint of that step needs its log.
        """
        floor = 0 if self._keeps else floor - self._goes_on_from_logs
        epoch, attempt = self._epoch, self._attempt
        if graded.teacher is not None:
            epoch, attempt = self._sampled_by.get(step, (epoch, attempt))
        about: dict[str, Any] = self._about | {"step": step, "stats": graded.stats}
        about |= {"epoch": epoch, "attempt": attempt}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(self.folder / f"{step_name(step)}.npz", [_archive(about, graded)])
        except OSError as error:
            self._unwritten[step] = str(error)
            self._failed(f"step {step} is not logged: {error}")
            return
        self._durable.add(step)
        rises = floor > self._floor
        if rises:
            for logged, path in _files(self.folder):
                if logged <= floor:
                    path.unlink(missing_ok=True)
        self._stored.discard(step)
        if self.storage:
            self._pool.submit(self._send, self.storage, step, floor if rises else 0)
        self._floor = max(self._floor, floor)

    def _send(self, storage: Storage, step: int, floor: int = 0) -> None:
        try:
            if self._held:
                self._held.check()
            if step not in self._stored:
                data = (self.folder / f"{step_name(step)}.npz").read_bytes()
                with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                    attempt = json.loads(archive["about"].tobytes()).get("attempt", self._attempt)
                key = f"{step_name(step)}/{attempt}.npz"
                storage.put_bytes(key, self._seal.signed_archive(f"{ROLLOUTS}/{key}", data))
                self._stored.add(step)
            if floor:
                storage.delete([key for logged, _, key in _objects(storage) if logged <= floor])
        except (FileNotFoundError, AttemptFenced):
            # The file was dropped meanwhile, or the attempt is over, which the next commit says.
            return
        except (StorageError, ConfigError, OSError) as error:
            self._failed(f"step {step} is logged on this disk only: {error}")

    # --- what a checkpoint rests on -------------------------------------------------------------------------

    def durable(self, steps: Sequence[int]) -> bool:
        """Whether the logs of all these steps lie on this disk or in the store.

        Raises CheckpointError where one could not be written: a checkpoint that needs it has failed.
        """
        for step in steps:
            if step in self._unwritten and step not in self._durable:
                raise CheckpointError(f"the rollout log of step {step} is not there: {self._unwritten[step]}")
        return self._durable.issuperset(steps)

    def make_durable(self, steps: Sequence[int]) -> None:
        """Waits until the store has the logs of these steps; those that it lacks are sent once more. Raises
        StorageError."""
        assert self.storage is not None
        for step in steps:
            self._pool.submit(self._send, self.storage, step).result()  # behind what is being sent
            if step not in self._stored and not dict(self.storage.list(step_name(step))):
                raise StorageError(f"the rollout log of step {step}, sampled ahead, is not in the store")

    def _failed(self, error: object) -> None:
        self.failures += 1
        self._say(str(error))

    def metrics(self) -> dict[str, float]:
        """Counts since the start of this process."""
        return {
            "perf/replayed_completions": float(self.replayed),
            "perf/rollout_log_failures": float(self.failures),
        }

    def close(self) -> None:
        """Waits for the upload under way; those that have not begun are left."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def logged_steps(
    folder: Path, storage: Storage | None, seal: Seal = OPEN
) -> Iterator[tuple[int, GradedStep]]:
    """All that is logged of one run, by step: the newest attempt's of each, and none that a newer one has
    replaced. seal: of the run, whose key a desk may have.

    What cannot be read is left out, with a line that says so.
    """
    found: dict[int, list[tuple[int, Path | str]]] = {}
    for step, path in _files(folder):
        with contextlib.suppress(*DAMAGED), np.load(path, allow_pickle=False) as archive:
            epoch = json.loads(archive["about"].tobytes())["epoch"]
            found.setdefault(step, []).append((epoch, path))
    for step, attempt, key in _objects(storage):
        found.setdefault(step, []).append((attempt, key))

    newest = 0
    for step, places in sorted(found.items()):
        # The first place of the newest attempt: this disk's comes before the store's.
        epoch, place = max(places, key=itemgetter(0))
        if epoch < newest:
            continue  # sampled by an attempt beside the one that had replaced it, or before it went back
        newest = epoch
        try:
            source: Any = place
            if isinstance(place, str) and storage:
                data = storage.get_bytes(place)
                seal.check_archive(f"{ROLLOUTS}/{place}", data)
                source = io.BytesIO(data)
            with np.load(source, allow_pickle=False) as archive:
                arrays = dict(archive)
            yield step, _graded(json.loads(arrays["about"].tobytes()), arrays)
        except DAMAGED as error:
            _say(f"step {step} is left out: {error}")


def _epoch(attempt: str) -> int:
    return int(attempt.partition("-")[0])


def _files(folder: Path) -> Iterator[tuple[int, Path]]:
    """The logs on this disk: (step, file)."""
    for path in folder.glob("step-*.npz"):
        match = LOCAL.fullmatch(path.name)
        if match is not None:
            yield int(match[1]), path


def _objects(storage: Storage | None) -> Iterator[tuple[int, int, str]]:
    """The logs in the store: (step, number of the attempt that sampled it, key)."""
    if storage is None:
        return
    for key, _ in storage.list():
        match = OBJECT.fullmatch(key)
        if match is not None:
            yield int(match[1]), int(match[3]), key


def _archive(about: dict[str, Any], graded: GradedStep) -> bytes:
    """A step's traces and outcomes as one NumPy archive; `_graded` reads it back without loss."""
    arrays = {"about": text_array(about)} | _columns(graded.traces)
    arrays["outcomes"] = text_array(list(map(astuple, graded.outcomes)))
    if graded.teacher is not None:
        arrays["teacher"] = np.concatenate(graded.teacher)
        arrays["teacher_tokens"] = np.array(list(map(len, graded.teacher)), np.int64)
    if graded.waiting:
        arrays |= {f"{WAITING}{name}": column for name, column in _columns(graded.waiting).items()}
    out = io.BytesIO()
    np.savez(out, **arrays)  # ty: ignore[invalid-argument-type]
    return out.getvalue()


def _columns(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    """Traces with their texts; `_traces` reads them back."""
    columns = trace_columns(traces)
    columns["texts"] = text_array([trace.text for trace in traces])
    if any(trace.dialog for trace in traces):
        columns["dialogs"] = text_array([trace.dialog for trace in traces])
    return columns


def _traces(columns: dict[str, np.ndarray]) -> list[Trace]:
    """The inverse of `_columns`."""
    traces = traces_of(columns, json.loads(columns["texts"].tobytes()))
    if "dialogs" not in columns:
        return traces
    dialogs = json.loads(columns["dialogs"].tobytes())
    return [replace(trace, dialog=tuple(said)) for trace, said in zip(traces, dialogs, strict=True)]


def _graded(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> GradedStep:
    """The inverse of `_archive`. Raises one of DAMAGED."""
    if about["format"] == SECOND_FORMAT:
        arrays |= _one_segment(arrays)
    traces = _first_format(arrays) if about["format"] == FIRST_FORMAT else _traces(arrays)
    outcomes = [Outcome(*outcome) for outcome in json.loads(arrays["outcomes"].tobytes())]
    if not traces or len(outcomes) != len(traces):
        raise ValueError(f"it has {len(traces)} completions and {len(outcomes)} outcomes")
    teacher = cut_pieces(arrays["teacher"], arrays["teacher_tokens"]) if "teacher" in arrays else None
    if teacher is not None and len(teacher) != len(traces):
        raise ValueError(f"it has {len(traces)} completions, and a teacher's judgment of {len(teacher)}")
    columns = {name[len(WAITING) :]: arrays[name] for name in arrays if name.startswith(WAITING)}
    return GradedStep(traces, outcomes, about["stats"], teacher, _traces(columns) if columns else ())


def _one_segment(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The segments of a log in which every trace was sampled by one version, or by none."""
    prompts = prompts_of(arrays)
    starts = np.array([len(prompts[group]) for group in arrays["group"].tolist()], np.int64)
    versions = arrays["versions"][:, 0]
    segments = np.stack([starts, versions], 1)
    return {"segments": segments[versions >= 0], "segment_counts": (versions >= 0).astype(np.int64)}


def _first_format(arrays: dict[str, np.ndarray]) -> list[Trace]:
    """Traces of a log that was written before there were any: one completion each, all of it learned."""
    texts = json.loads(arrays["texts"].tobytes())
    prompts = prompts_of(arrays)
    completions = cut_pieces(arrays["token_ids"], arrays["tokens"])
    logprobs = cut_pieces(arrays["logprobs"], arrays["tokens"])
    traces = []
    for i, group in enumerate(arrays["group"].tolist()):
        version = int(arrays["weight_version"][i])
        trace = completed_trace(
            prompts[group],
            completions[i],
            group=group,
            row=int(arrays["row"][i]),
            index=int(arrays["index"][i]),
            logprobs=logprobs[i],
            version=version,
            end="stop" if arrays["finished"][i] else "length",
            text=texts[i],
        )
        traces.append(trace)
    return traces
