"""The driver's side of checkpoints: when one is due, its commit, retention, and finding the one to resume from.

The commit point is `manifest.json`, written last, locally and then in the object store; readers ignore a folder without
one. An older checkpoint goes only after the new one is committed remotely.

    if checkpoints.due(step, step_time_s):
        checkpoints.begin(step, state)                      # state is frozen here
        workers.save(step, keep=checkpoints.local_steps())  # ShardWriter.start in every worker
    ...
    if checkpoints.in_flight is not None:                   # every step, and `finish` at the end
        try:
            checkpoints.advance(workers.save_status())      # commits once every rank is done
        except CheckpointError as error:                    # a rank could not write
            checkpoints.failed(error)
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from trainer import preempt
from trainer.checkpoint_find import find, manifests_here, manifests_there
from trainer.checkpoint_read import CorruptCheckpoint, Found, ShardReader, export_hf, fetch_all
from trainer.checkpoint_write import (
    CheckpointError,
    FileRecord,
    Shard,
    ShardWriter,
    code_fingerprint,
    disk_room,
    encode,
    local_dir,
    pack,
    remote_url,
    step_name,
    upload,
    write_file,
)
from trainer.config import ConfigError, RunConfig, fingerprint, resume_view
from trainer.storage import Storage, StorageError

__all__ = ["CheckpointError", "Checkpoints", "CorruptCheckpoint", "FileRecord", "Found", "Shard", "ShardReader"]
__all__ += ["ShardWriter", "code_fingerprint", "export_hf", "fetch_all"]

T = TypeVar("T")
MAX_FAILURES = 3
"""Checkpoints that may fail in a row before the run stops: it would go on unprotected."""


def _say(text: str) -> None:
    print(f"checkpoint: {text}", file=sys.stderr, flush=True)


class Checkpoints:
    """Commits, keeps and finds the checkpoints of one run.

    data_fingerprint: of the dataset that is trained on. Raises StorageError from `advance`, `finish` and `failed` after
    MAX_FAILURES failures in a row; before that a failure is told, counted, and the next step tries again.
    """

    def __init__(
        self,
        config: RunConfig,
        data_fingerprint: str = "",
        *,
        storage: Storage | None = None,
        say: Callable[[str], None] = _say,
    ):
        self.config, self.data_fingerprint, self._say = config, data_fingerprint, say
        self.folder, self.url = local_dir(config), remote_url(config)
        self.storage = storage or (Storage(self.url) if self.url else None)
        self.in_flight: int | None = None
        self.committed: int | None = None
        self.save_s = 0.0
        """From `begin` to the commit, of the last checkpoint."""
        self.stall_s = 0.0
        """What the last checkpoint took from training: set it after the workers have copied."""
        self.interval_steps = max(1, config.checkpoint.every_steps)
        self.failures = self.failures_in_a_row = 0
        self._last_begun = 0
        self._retry = False
        self._begun_at = 0.0
        self._bytes = 0
        self._pending: dict[str, Any] = {}
        self._remote: Future | None = None
        self._stale: list[int] = []
        self._pool: ThreadPoolExecutor | None = None

    # --- when ---------------------------------------------------------------------------------------------------------

    def due(self, step: int, step_time_s: float, last: bool = False) -> bool:
        """Whether to save after `step`. One checkpoint at a time: a due one waits for the one under way.

        With every_steps 0 the first step is saved, to measure, and then as Daly's formula says. last: the run ends.
        Raises StorageError after MAX_FAILURES failures in a row.
        """
        self.poll()
        if self.in_flight is not None:
            return False
        if last or self._retry:
            return step != self._last_begun or self._retry
        if self.config.checkpoint.every_steps == 0 and step_time_s > 0:
            if self._last_begun == 0 or self.save_s == 0:
                return step != self._last_begun
            mtbf_s = self.config.checkpoint.mean_time_between_preemptions_s
            wanted_s = max(preempt.save_interval_s(max(self.stall_s, 0.001), mtbf_s), self.save_s)
            steps = max(1, round(wanted_s / step_time_s))
            if abs(steps - self.interval_steps) > 0.25 * self.interval_steps:
                self._say(
                    f"saving every {steps} steps ({steps * step_time_s:.0f} s): a save stalls {self.stall_s:.2f} s and "
                    f"commits after {self.save_s:.1f} s, one preemption in {mtbf_s:.0f} s"
                )
                self.interval_steps = steps
        return (
            step - self._last_begun >= self.interval_steps or step % self.interval_steps == 0 != self._last_begun - step
        )

    def fits(self, remaining_s: float) -> bool:
        """Whether a checkpoint begun now would be committed within the notice. Never before one has been measured."""
        return self.in_flight is None and self.save_s > 0 and 1.3 * self.save_s + 0.5 < remaining_s

    # --- writing ------------------------------------------------------------------------------------------------------

    def begin(
        self, step: int, state: dict[str, Any], *, score: float | None = None, attach: Iterable[str | Path] = ()
    ) -> None:
        """Opens the checkpoint of `step` before the workers write.

        state: JSON values, tensors, arrays, bytes; read back as `Found.state`. score: held-out score for keep_best.
        attach: append-only files of the run (metrics.jsonl) that a resume on a fresh node needs.
        """
        assert self.in_flight is None, "one checkpoint at a time"
        self._retry = False
        for stale in {*self._stale, step}:
            (self.folder / step_name(stale) / "manifest.json").unlink(missing_ok=True)
        if self.storage and self._stale:  # passed over on resume: what follows replaces them
            self._submit(self.storage.delete, [f"{step_name(stale)}/manifest.json" for stale in self._stale])
        self._stale = []
        self._make_room()
        self.in_flight, self._last_begun, self._begun_at = step, step, time.monotonic()
        self._pending = {
            "state": json.dumps(encode(state), sort_keys=True).encode(),
            "score": score,
            "attach": [(Path(path), Path(path).stat().st_size) for path in attach if Path(path).is_file()],
        }

    def advance(self, statuses: Sequence[list[FileRecord] | None]) -> bool:
        """Commits the checkpoint under way once every rank has records. Returns whether it did. Raises StorageError."""
        self.poll()
        if self.in_flight is None or any(status is None for status in statuses):
            return False
        self.commit(self.in_flight, [record for status in statuses for record in status or []])
        return True

    def commit(self, step: int, records: Sequence[FileRecord], state: dict[str, Any] | None = None) -> None:
        """Writes the manifest locally, and in a thread remotely; then retention. `state` replaces that of `begin`."""
        assert step == self.in_flight, f"step {step} was not begun"
        folder = self.folder / step_name(step)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            text = self._pending["state"] if state is None else json.dumps(encode(state), sort_keys=True).encode()
            own = [FileRecord("state.json", *write_file(folder / "state.json", [text]))]
            for path, size in self._pending["attach"]:
                own.append(FileRecord(path.name, *write_file(folder / path.name, [_head(path, size)])))
            manifest = self._manifest(step, [*records, *own])
            write_file(folder / "manifest.json", [pack(manifest)])
        except OSError as error:
            return self.failed(f"the commit of step {step} failed: {error}")
        self._bytes = manifest["bytes"]
        self.in_flight = None
        if self.storage:
            self._settle()
            self._remote = self._submit(self._commit_remotely, step, manifest, list(records), own)
        else:
            self._done(step)
            self._prune_local()

    def failed(self, error: object) -> None:
        """A rank could not write: the checkpoint is dropped, told, and tried again after the next step.

        Raises StorageError when that has happened MAX_FAILURES times in a row.
        """
        self.in_flight = None
        self._count_failure(error)

    def _count_failure(self, error: object) -> None:
        self.failures += 1
        self.failures_in_a_row += 1
        self._retry = self.in_flight is None
        self._say(f"{error} ({self.failures_in_a_row} in a row)")
        if self.failures_in_a_row >= MAX_FAILURES:
            raise StorageError(f"{self.failures_in_a_row} checkpoints in a row failed, the last with: {error}")

    def poll(self) -> None:
        """Takes in the result of a remote commit. Raises StorageError as `failed` does."""
        if self._remote is not None and self._remote.done():
            remote, self._remote = self._remote, None
            error = remote.exception()
            if error is not None:
                if not isinstance(error, StorageError | ConfigError | OSError):
                    raise error
                self._count_failure(error)

    def finish(self, statuses: Callable[[], Sequence[list[FileRecord] | None]], poll_s: float = 0.05) -> None:
        """Waits for the checkpoint under way and its remote commit. Raises StorageError."""
        while self.in_flight is not None and not self.advance(statuses()):
            time.sleep(poll_s)
        self._settle()

    def _settle(self) -> None:
        """Waits for the remote commit under way and takes in its result."""
        if self._remote is not None:
            self._remote.exception()
            self.poll()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written, or committed to the store."""
        return self.in_flight is not None or (self._remote is not None and not self._remote.done())

    def close(self) -> None:
        """Waits for what is being committed, and ends the commit thread (a later commit starts it again)."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _submit(self, action: Callable[..., None], *arguments: Any) -> Future:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="commit")
        return self._pool.submit(action, *arguments)

    def metrics(self) -> dict[str, float]:
        """Figures of the last checkpoint; they may differ between equal runs."""
        return {
            "perf/checkpoint_save_s": self.save_s,
            "perf/checkpoint_stall_s": self.stall_s,
            "perf/checkpoint_gib": self._bytes / 2**30,
            "perf/checkpoint_failures": float(self.failures),
            "perf/checkpoint_interval_steps": float(self.interval_steps),
        }

    def _manifest(self, step: int, records: Sequence[FileRecord]) -> dict[str, Any]:
        ranks = {record.name.partition("-of-")[2][:5] for record in records if record.name.startswith("rank-")}
        return {
            "format": "spotrl-checkpoint-1",
            "run_id": self.config.run_id,
            "step": step,
            "world_size": int(ranks.pop()) if len(ranks) == 1 else self.config.placement.world_size,
            "bytes": sum(record.bytes for record in records),
            "score": self._pending["score"],
            "fingerprint": fingerprint(self.config),
            "config": resume_view(self.config),
            "data_fingerprint": self.data_fingerprint,
            "code_fingerprint": code_fingerprint(),
            "files": [{key: asdict(r)[key] for key in ("name", "bytes", "sha256")} for r in records],
        }

    def _commit_remotely(self, step: int, manifest: dict, records: list[FileRecord], own: list[FileRecord]) -> None:
        assert self.storage is not None
        lost = [r for r in records if not r.uploaded]
        if lost:
            raise StorageError(f"step {step} is committed locally only: {lost[0].name}: {lost[0].error}")
        folder, name = self.folder / step_name(step), step_name(step)
        for record in (upload(self.storage, folder, r) for r in own):
            if not record.uploaded:
                raise StorageError(f"step {step} is committed locally only: {record.name}: {record.error}")
        self.storage.put_bytes(f"{name}/manifest.json", pack(manifest))
        self._done(step)
        self._prune_local()
        self._prune_remote()

    def _done(self, step: int) -> None:
        self.committed, self.save_s, self.failures_in_a_row = step, time.monotonic() - self._begun_at, 0

    # --- retention ----------------------------------------------------------------------------------------------------

    def local_steps(self) -> list[int]:
        """Steps of the committed local checkpoints: what the workers' writers must keep."""
        return sorted(manifests_here(self.folder))

    def _keep(self, manifests: dict[int, dict[str, Any]], last: int) -> set[int]:
        scored = [m for m in manifests.values() if m["score"] is not None]
        best = sorted(scored, key=lambda m: (m["score"], m["step"]), reverse=True)[: self.config.checkpoint.keep_best]
        return set(sorted(manifests)[-last:]) | {m["step"] for m in best}

    def _prune_local(self) -> None:
        manifests = manifests_here(self.folder)
        keep = self._keep(manifests, self.config.checkpoint.keep_last)
        newest = max(manifests, default=0)
        for folder in self.folder.glob("step-*"):
            step = int(folder.name.removeprefix("step-"))
            if step not in keep and step <= newest and step != self.in_flight:
                self._drop(folder)

    def _prune_remote(self) -> None:
        assert self.storage is not None
        manifests, sizes = manifests_there(self.storage)
        steps: dict[int, list[str]] = {}
        for key in sizes:
            if key.startswith("step-"):
                steps.setdefault(int(key[5:13]), []).append(key)
        keep = self._keep(manifests, self.config.checkpoint.keep_last_remote)
        newest = max(manifests, default=0)
        for step, keys in steps.items():
            if step not in keep and step <= newest and step != self.in_flight:
                self.storage.delete([f"{step_name(step)}/manifest.json"])  # first: from here on it is no checkpoint
                self.storage.delete(keys)

    def _drop(self, folder: Path) -> None:
        (folder / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def _make_room(self) -> None:
        """Drops local checkpoints but the newest, oldest first, while the next one would not fit the disk budget."""
        while self._bytes > disk_room(self.folder, self.config.checkpoint.max_disk_gib):
            steps = self.local_steps()
            if len(steps) < 2:
                return  # the writers refuse, with the figures
            self._say(f"dropping the local checkpoint of step {steps[0]} early: the disk budget needs its room")
            self._drop(self.folder / step_name(steps[0]))

    # --- resume -------------------------------------------------------------------------------------------------------

    def find(self, before: int | None = None) -> Found | None:
        """The newest committed checkpoint, local or remote, that is whole; None if there is none (or resume: never).

        before: only steps below this one (after a CorruptCheckpoint). Local files are compared with their sha256 here,
        remote ones by size here and by sha256 when they are fetched. Tells which checkpoints it passed over and why.
        A checkpoint that a kill left committed locally only is sent to the store beside the run's start.
        Raises ConfigError if the checkpoint belongs to another configuration or dataset, naming the difference.
        """
        config = self.config
        if self.committed is not None and config.checkpoint.resume == "never":  # the checkpoints are this run's own
            config = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
        found, self._stale = find(config, self.data_fingerprint, self.storage, before, self._say)
        if found is not None:
            self._last_begun = self.committed = found.step
            self._bytes = found.manifest["bytes"]
            if self.storage and not found.url:
                self._remote = self._submit(self._push, found)
        return found

    def restore(self, load: Callable[[Found], T]) -> tuple[Found, T] | None:
        """Finds a checkpoint and loads it, falling back when `load` raises CorruptCheckpoint. None: start afresh."""
        before = None
        while (found := self.find(before)) is not None:
            try:
                return found, load(found)
            except CorruptCheckpoint as error:
                self._say(f"{error}; falling back to the checkpoint before")
                before = found.step
        return None

    def fetch(self, found: Found, local_dir: str | Path | None = None) -> Path:
        """Brings all files of a checkpoint to a local folder, verified. Raises CorruptCheckpoint."""
        return fetch_all(replace(found, directory=str(local_dir)) if local_dir else found)

    def _push(self, found: Found) -> None:
        assert self.storage is not None
        for entry in found.manifest["files"]:
            record = upload(self.storage, Path(found.directory), FileRecord(**entry))
            if not record.uploaded:
                raise StorageError(f"step {found.step} is committed locally only: {record.name}: {record.error}")
        self.storage.put_bytes(f"{step_name(found.step)}/manifest.json", pack(found.manifest))
        self._say(f"step {found.step} had been committed locally only; the store has it now")


def _head(path: Path, size: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(size)
