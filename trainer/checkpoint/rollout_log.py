"""The rollout log: a step's graded completions, durable before its update: a restart samples none of them
again.

    <run.dir>/rollouts/step-00000021.npz                      written before the update of step 21
    <remote>/<run id>/rollouts/step-00000021/7-3f2c1a.npz     sent beside it, under the attempt that sampled it

A restart from step 20 replays what is logged of 21, 22, ...: same token ids, log-probabilities and outcomes,
so same updates, bit for bit. Files are plain NumPy archives without pickles; the CRC of every array is
compared on reading.
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
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.algorithm.traces import Outcome, Trace, completed
from trainer.checkpoint.attempt import Attempt, Fenced
from trainer.checkpoint.format import write_file
from trainer.checkpoint.layout import step_name
from trainer.checkpoint.manifest import code_fingerprint
from trainer.checkpoint.trace_columns import cut, prompts_of, text_array, trace_columns, traces_of
from trainer.config import ConfigError, RunConfig, fingerprint
from trainer.config.run_store import RunStore
from trainer.errors import StorageError
from trainer.storage.storage import Storage
from trainer.storage.stores import Retry

OBJECT = re.compile(r"step-(\d{8})/((\d+)-[0-9a-f]{6})\.npz")
"""Key of a step's log in the store: (step, attempt, its number)."""
LOCAL = re.compile(r"step-(\d{8})\.npz")
FORMAT, FIRST_FORMAT = "spotrl-rollout-2", "spotrl-rollout-1"
DAMAGED = (OSError, ValueError, LookupError, EOFError, TypeError, zipfile.BadZipFile)
"""What reading an archive raises that is not whole, or is none."""
RETRY = Retry(attempts=2)
"""The log saves work and guards none: a store that is away costs the restart its sampling, nothing else."""


@dataclass(frozen=True)
class Graded:
    """A step's completions, in the order of the loop, with what the grader said of each."""

    traces: list[Trace]
    outcomes: list[Outcome]
    stats: dict[str, float]
    """The grader's metrics of the batch."""


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
        self._say, self._held = say, held
        # A run that goes back samples again: what it goes back behind may be what the engine sampled.
        self._resumes = config.checkpoint.resume != "never" and not config.checkpoint.before
        self._keeps = config.logging.keep_rollouts
        self.folder = Path(RunStore.here(config).rollouts)
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
        self.replayed = self.failures = 0
        self._usable: dict[int, list[_Place]] = {}
        self._floor = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollout-log")

    @property
    def _epoch(self) -> int:
        return self._held.epoch if self._held else 0

    # --- replaying ------------------------------------------------------------------------------------------

    def open(self, step: int) -> list[int]:
        """Looks for the steps after `step` that can be replayed; returns them.

        They are those of one history: of each step the newest attempt's, and never an older attempt's after a
        newer one's, which would be an attempt that went on beside the one that had replaced it.
        """
        found = self._places(step) if self._resumes else {}
        self._usable = {}
        epoch = 0
        at = step + 1
        while at in found and (newest := max(place.epoch for place in found[at])) >= epoch:
            self._usable[at] = [place for place in found[at] if place.epoch == newest]
            epoch, at = newest, at + 1
        if self._usable:
            self._say(f"steps {step + 1} to {at - 1} are replayed: their completions are not sampled again")
        return list(self._usable)

    def _places(self, after: int) -> dict[int, list[_Place]]:
        """Where the logs of the steps after `after` lie: this disk's first."""
        found: dict[int, list[_Place]] = {}
        for path in self.folder.glob("step-*.npz"):
            if (match := LOCAL.fullmatch(path.name)) and int(match[1]) > after:
                with contextlib.suppress(*DAMAGED), np.load(path, allow_pickle=False) as archive:
                    epoch = self._header(archive, int(match[1]))["epoch"]
                    found.setdefault(int(match[1]), []).append(_Place(epoch))
        try:
            for key, _ in self.storage.list() if self.storage else ():
                if (match := OBJECT.fullmatch(key)) and int(match[1]) > after:
                    found.setdefault(int(match[1]), []).append(_Place(int(match[3]), key))
        except (StorageError, ConfigError) as error:
            self._failed(error)
        return found

    def read(self, step: int) -> Graded | None:
        """The graded completions of a step that can be replayed; None: sample them."""
        why: object = ""
        for place in self._usable.pop(step, ()):
            try:
                local = self.folder / f"{step_name(step)}.npz"
                source = (
                    io.BytesIO(self.storage.get_bytes(place.key)) if place.key and self.storage else local
                )
                with np.load(source, allow_pickle=False) as archive:
                    graded = _graded(self._header(archive, step), dict(archive))
                self.replayed += len(graded.traces)
                return graded
            except (*DAMAGED, StorageError, ConfigError) as error:
                why = error
        if why:
            self._usable.clear()  # what follows was sampled after this one
            self._failed(f"step {step} cannot be replayed ({why}): its completions are sampled again")
        return None

    def _header(self, archive: Any, step: int) -> dict[str, Any]:
        """What a log says of itself. Raises ValueError where it is of another run, configuration, dataset or
        code."""
        about = json.loads(archive["about"].tobytes())
        for key, value in (self._about | {"step": step}).items():
            if about[key] != value:
                raise ValueError(f"its {key} is another")
        return about

    # --- writing --------------------------------------------------------------------------------------------

    def write(self, step: int, graded: Graded, floor: int = 0) -> None:
        """Makes a step's completions durable here, and sends them to the store beside what follows.

        floor: oldest step that a restart may go on from; what is logged up to it is dropped, here and there,
        unless the run keeps all of it (`logging.keep_rollouts`).
        """
        floor = 0 if self._keeps else floor
        about = self._about | {"step": step, "epoch": self._epoch, "stats": graded.stats}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(self.folder / f"{step_name(step)}.npz", [_archive(about, graded)])
        except OSError as error:
            self._failed(f"step {step} is not logged: {error}")
            return
        if floor > self._floor:
            for path in self.folder.glob("step-*.npz"):
                if (match := LOCAL.fullmatch(path.name)) and int(match[1]) <= floor:
                    path.unlink(missing_ok=True)
        if self.storage:
            self._pool.submit(self._send, self.storage, step, floor if floor > self._floor else 0)
        self._floor = max(self._floor, floor)

    def _send(self, storage: Storage, step: int, floor: int) -> None:
        attempt = self._held.name if self._held else "0-000000"
        try:
            if self._held:
                self._held.check()
            data = (self.folder / f"{step_name(step)}.npz").read_bytes()
            storage.put_bytes(f"{step_name(step)}/{attempt}.npz", data)
            if floor:
                keys = [(key, OBJECT.fullmatch(key)) for key, _ in storage.list()]
                storage.delete([key for key, match in keys if match and int(match[1]) <= floor])
        # dropped meanwhile; and the next commit says that the attempt is over
        except (FileNotFoundError, Fenced):
            return
        except (StorageError, ConfigError, OSError) as error:
            self._failed(f"step {step} is logged on this disk only: {error}")

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


def history(folder: Path, storage: Storage | None) -> Iterator[tuple[int, Graded]]:
    """All that is logged of one run, by step: the newest attempt's of each, and none that a newer one has
    replaced.

    What cannot be read is left out, with a line that says so.
    """
    found: dict[int, list[tuple[int, Path | str]]] = {}
    for path in folder.glob("step-*.npz"):
        if match := LOCAL.fullmatch(path.name):
            with contextlib.suppress(*DAMAGED), np.load(path, allow_pickle=False) as archive:
                epoch = json.loads(archive["about"].tobytes())["epoch"]
                found.setdefault(int(match[1]), []).append((epoch, path))
    for key, _ in storage.list() if storage else ():
        if match := OBJECT.fullmatch(key):
            found.setdefault(int(match[1]), []).append((int(match[3]), key))
    newest = 0
    for step, places in sorted(found.items()):
        epoch = max(epoch for epoch, _ in places)
        if epoch < newest:
            continue  # sampled by an attempt beside the one that had replaced it, or before it went back
        newest = epoch
        place = next(place for at, place in places if at == epoch)
        try:
            source = io.BytesIO(storage.get_bytes(place)) if isinstance(place, str) and storage else place
            with np.load(source, allow_pickle=False) as archive:
                arrays = dict(archive)
            yield step, _graded(json.loads(arrays["about"].tobytes()), arrays)
        except DAMAGED as error:
            _say(f"step {step} is left out: {error}")


def _archive(about: dict[str, Any], graded: Graded) -> bytes:
    """A step's traces and outcomes as one NumPy archive; `_graded` reads it back without loss."""
    arrays = {"about": text_array(about)} | trace_columns(graded.traces)
    arrays["texts"] = text_array([trace.text for trace in graded.traces])
    arrays["outcomes"] = text_array([astuple(outcome) for outcome in graded.outcomes])
    out = io.BytesIO()
    np.savez(out, **arrays)  # ty: ignore[invalid-argument-type]
    return out.getvalue()


def _graded(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> Graded:
    """The inverse of `_archive`. Raises one of DAMAGED."""
    texts = json.loads(arrays["texts"].tobytes())
    read = _first_format if about["format"] == FIRST_FORMAT else traces_of
    traces = read(arrays, texts)
    outcomes = [Outcome(*outcome) for outcome in json.loads(arrays["outcomes"].tobytes())]
    if not traces or len(outcomes) != len(traces):
        raise ValueError(f"it has {len(traces)} completions and {len(outcomes)} outcomes")
    return Graded(traces, outcomes, about["stats"])


def _first_format(arrays: dict[str, np.ndarray], texts: Sequence[str]) -> list[Trace]:
    """Traces of a log that was written before there were any: one completion each, all of it learned."""
    prompts = prompts_of(arrays)
    completions = cut(arrays["token_ids"], arrays["tokens"])
    logprobs = cut(arrays["logprobs"], arrays["tokens"])
    traces = []
    for i, group in enumerate(arrays["group"].tolist()):
        version = int(arrays["weight_version"][i])
        trace = completed(
            prompts[group],
            completions[i],
            group=group,
            row=int(arrays["row"][i]),
            index=int(arrays["index"][i]),
            logprobs=logprobs[i],
            versions=(version, version),
            end="stop" if arrays["finished"][i] else "length",
            text=texts[i],
        )
        traces.append(trace)
    return traces
