"""The store's commits: in a thread, one at a time, so that training does not wait for the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainer.checkpoint.layout import remote_folder, step_name
from trainer.checkpoint.manifest import FileRecord, manifests_here, pack
from trainer.checkpoint.place import CheckpointPlace, CheckpointProgress
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.rollout_log import RolloutLog
from trainer.checkpoint.shard_reader import FoundCheckpoint
from trainer.checkpoint.writer import upload_file
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError


class StoreCommits:
    """Commits in the store what lies there whole, after the rollout logs that it needs."""

    def __init__(
        self,
        storage: Storage,
        place: CheckpointPlace,
        progress: CheckpointProgress,
        retention: Retention,
        logs: RolloutLog | None,
    ) -> None:
        self._storage, self._place = storage, place
        self._progress, self._retention = progress, retention
        self._logs = logs
        self._commit: Future | None = None
        self._pool: ThreadPoolExecutor | None = None

    @property
    def busy(self) -> bool:
        return self._commit is not None

    def poll(self) -> None:
        """Takes in how a commit has ended. Raises StorageError as
        `CheckpointProgress.count_failure` does."""
        if self._commit is None or not self._commit.done():
            return
        error = self._commit.exception()
        self._commit = None
        self._progress.uploading = None
        if error is not None:
            if not isinstance(error, StorageError | OSError):
                raise error
            self._progress.count_failure(error, self._place.say)

    def commit(self, step: int, records: Sequence[FileRecord]) -> None:
        """Starts to commit a step whose files every rank has sent. records: of these."""
        self._commit = self._submit(self._store, step, records)

    def push(self, found: FoundCheckpoint) -> None:
        """Starts to send and commit a checkpoint that an earlier process left on this disk alone: the ranks
        of this one cannot send it."""
        self._commit = self._submit(self._push, found)

    def withdraw(self, steps: set[int]) -> None:
        self._submit(self._retention.withdraw, self._storage, steps)

    def close(self) -> None:
        """Waits for what is being committed, and ends the thread (a later commit starts it again)."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _submit(self, action: Callable[..., None], *arguments: Any) -> Future:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="commit")
        return self._pool.submit(action, *arguments)

    def _store(self, step: int, records: Sequence[FileRecord]) -> None:
        lost = [record for record in records if not record.uploaded]
        if lost:
            raise StorageError(f"step {step} is committed locally only: {lost[0].name}: {lost[0].error}")
        folder = self._place.folder
        manifest = manifests_here(folder)[step]
        self._send(step, folder / step_name(step), manifest, {record.name for record in records})

    def _push(self, found: FoundCheckpoint) -> None:
        self._send(found.step, Path(found.directory), found.manifest, set())
        self._place.say(f"step {found.step} had been committed locally only; the store has it now")

    def _send(self, step: int, folder: Path, manifest: dict[str, Any], sent: set[str]) -> None:
        """Uploads the files of a checkpoint but those in `sent`, and last its manifest; then retention."""
        place, storage = self._place, self._storage
        place.check()
        inside = remote_folder(step, manifest.get("attempt", ""))
        self._upload(step, folder, inside, manifest, sent)
        if self._logs and manifest.get("ahead"):
            self._logs.make_durable(manifest["ahead"])
        place.go_on_from(self._progress.resumed_from)
        place.check()
        # Older checkpoints are dropped for this one, so it is read back.
        storage.put_proven(f"{inside}/manifest.json", pack(manifest, place.seal, inside))
        self._progress.stored = max(self._progress.stored, step)
        self._retention.committed(step)
        self._progress.failures_in_a_row = 0
        self._retention.prune_local()
        self._retention.prune_remote(storage)

    def _upload(self, step: int, folder: Path, inside: str, manifest: dict[str, Any], sent: set[str]) -> None:
        """Uploads the files that are not in `sent`, and sees whether all of them are whole there."""
        for entry in manifest["files"]:
            if entry["name"] in sent:
                continue
            record = upload_file(self._storage, folder, inside, FileRecord(**entry))
            if not record.uploaded:
                raise StorageError(f"step {step} is committed locally only: {record.name}: {record.error}")
        there = dict(self._storage.list(inside))
        for entry in manifest["files"]:
            key = f"{inside}/{entry['name']}"
            # A listing may lag behind the store, so a file that it lacks is asked for by itself.
            if there.get(key) != entry["bytes"] and self._storage.size(key) != entry["bytes"]:
                raise StorageError(
                    f"step {step} is committed locally only: {entry['name']} is not whole in the store"
                )
