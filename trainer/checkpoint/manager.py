"""The driver's side of checkpoints: when one is due, its commit, retention, and finding the one to resume
from.

The commit point is `manifest.json`, written last; readers ignore a folder without one. A checkpoint is
committed twice: on the disk as soon as every rank has written its files, and in the object store once every
rank has uploaded them. An older checkpoint goes only after the new one is committed in the store.

    if checkpoints.due(step, step_time_s):
        checkpoints.begin(step, state)                      # state is frozen here
        keep, to = checkpoints.retention.local_steps(), checkpoints.attempt
        learner.save(step, keep, checkpoints.sends, to)     # ShardWriter.start on every rank
    ...
    if checkpoints.busy:                                    # between phases, and until it is done at the end
        try:
            checkpoints.advance(learner.save_status())      # commits what every rank is done with
        except CheckpointError as error:                    # a rank could not write
            checkpoints.failed(error)
    step = checkpoints.to_send()
    if step is not None:                                    # not uploaded when it was written, or that failed
        learner.send(step)                                  # ShardWriter.send on every rank
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from trainer.checkpoint.attempt import Attempt
from trainer.checkpoint.format import encode_state, write_file
from trainer.checkpoint.layout import remote_folder, remote_url, step_name
from trainer.checkpoint.manifest import CorruptCheckpoint, FileRecord, manifest_of, manifests_here, pack
from trainer.checkpoint.place import CheckpointPlace, CheckpointProgress, Retention, SaveSchedule, drop
from trainer.checkpoint.rollout_log import RolloutLog
from trainer.checkpoint.shard_reader import FoundCheckpoint, find_checkpoint
from trainer.checkpoint.writer import RankStatus, upload_file
from trainer.config import RunConfig, of_teacher
from trainer.storage import hub
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError

T = TypeVar("T")


def _say(text: str) -> None:
    print(f"checkpoint: {text}", file=sys.stderr, flush=True)


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
        """Takes in how a commit has ended. Raises StorageError as `CheckpointProgress.count_failure` does."""
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

    def push(self, local: FoundCheckpoint) -> None:
        """Starts to send and commit a checkpoint that an earlier process left on this disk alone: the ranks
        of this one cannot send it."""
        self._commit = self._submit(self._push, local)

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

    def _push(self, local: FoundCheckpoint) -> None:
        self._send(local.step, Path(local.directory), local.manifest, set())
        self._place.say(f"step {local.step} had been committed locally only; the store has it now")

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
        stored = dict(self._storage.list(inside))
        for entry in manifest["files"]:
            key = f"{inside}/{entry['name']}"
            # A listing may lag behind the store, so a file that it lacks is asked for by itself.
            if stored.get(key) != entry["bytes"] and self._storage.size(key) != entry["bytes"]:
                raise StorageError(
                    f"step {step} is committed locally only: {entry['name']} is not whole in the store"
                )


@dataclass(frozen=True)
class DriverFiles:
    """What the driver adds to a checkpoint that the ranks write, as it was when that began."""

    state: bytes
    score: float | None
    ahead: list[int]
    """Steps after the checkpoint's whose rollout logs it needs."""
    attached: list[tuple[Path, int]]
    """Append-only files, and how much of each is saved."""


class Checkpoints:
    """Commits, keeps and finds the checkpoints of one run.

    data_fingerprint: of the dataset that is trained on. attempt: the right to write for this run; without it
    there is none to lose (reading, tests of one writer). logs: where the run samples ahead, a checkpoint is
    committed after the logs that it needs, on the disk and in the store. Raises StorageError from `advance`
    and `failed` after MAX_FAILURES failures in a row; before that a failure is told, counted, and the next
    step tries again. Raises AttemptFenced from wherever it would have written or deleted after a newer
    attempt has started.
    """

    def __init__(
        self,
        config: RunConfig,
        data_fingerprint: str = "",
        *,
        attempt: Attempt | None = None,
        logs: RolloutLog | None = None,
        storage: Storage | None = None,
        say: Callable[[str], None] = _say,
    ):
        if storage is None and (url := remote_url(config)):
            storage = Storage(url)
        self.place = CheckpointPlace(config, storage, attempt, say)
        self.progress = CheckpointProgress(has_store=storage is not None)
        self.schedule = SaveSchedule(config.checkpoint, say)
        self.retention = Retention(self.place, self.progress)
        self._store = None
        if storage:
            self._store = StoreCommits(storage, self.place, self.progress, self.retention, logs)
        self._logs = logs
        self._about: dict[str, Any] = {
            "attempt": self.attempt,
            "data_fingerprint": data_fingerprint,
            "before": config.checkpoint.before,
            "model_fingerprint": hub.model_fingerprint(config),
        }
        if config.teaches:
            self._about["teacher_fingerprint"] = hub.model_fingerprint(of_teacher(config))
        self._files: DriverFiles | None = None
        self._usable: FoundCheckpoint | None = None
        self._stale: list[int] = []
        """Steps of checkpoints that were passed over on resume; what follows replaces them."""

    @property
    def attempt(self) -> str:
        """Folder of this attempt within every step's in the store."""
        return self.place.attempt.name if self.place.attempt else ""

    @property
    def folder(self) -> Path:
        return self.place.folder

    @property
    def storage(self) -> Storage | None:
        return self.place.storage

    # --- when -----------------------------------------------------------------------------------------------

    def due(self, step: int, step_time_s: float, last: bool = False) -> bool:
        """Whether to save after `step`. One is written at a time; beside an upload only where the disk has
        room for it. last: the run ends. Raises StorageError after MAX_FAILURES failures in a row."""
        self.poll()
        if self.progress.writing is not None or not self.schedule.wants(step, step_time_s, last):
            return False
        return self.progress.uploading is None or self.retention.make_room(self._share) >= self._share

    @property
    def _share(self) -> int:
        """Bytes of a checkpoint that lie on this node."""
        return self.schedule.checkpoint_bytes // self.place.config.placement.nodes

    def fits(self, remaining_s: float) -> bool:
        """Whether a checkpoint begun now would be written in time; what is left then goes to the store."""
        # The one that is being written comes first.
        return self.schedule.fits(remaining_s, writes=1 if self.progress.writing is None else 2)

    # --- writing --------------------------------------------------------------------------------------------

    def begin(
        self,
        step: int,
        state: dict[str, Any],
        *,
        score: float | None = None,
        attach: Iterable[str | Path] = (),
        ahead: Sequence[int] = (),
    ) -> None:
        """Opens the checkpoint of `step` before the ranks write. state: JSON values, tensors, arrays, bytes;
        read back as `Found.state`. score: held-out score for keep_best. attach: append-only files of the run
        (metrics.jsonl) that a resume on a fresh node needs. ahead: steps after it whose completions older
        weights have sampled: it needs their rollout logs."""
        assert self.progress.writing is None, "one checkpoint at a time"
        for stale in self._stale:
            drop(self.folder / step_name(stale))
        folder = self.folder / step_name(step)
        (folder / "manifest.json").unlink(missing_ok=True)
        if self._store and self._stale:
            self._store.withdraw(set(self._stale))
        # What an attempt left that was cut off may be of other ranks.
        for path in folder.glob("rank-*"):
            path.unlink(missing_ok=True)
        self._stale = []
        self.retention.make_room(self._share)
        self.schedule.begin(step)
        self.progress.writing = step
        if self._store and self.progress.uploading is None:
            self.progress.uploading = step
        # Attached files may grow: what they hold now is saved.
        attached = [(path, path.stat().st_size) for path in map(Path, attach) if path.is_file()]
        encoded = json.dumps(encode_state(state), sort_keys=True).encode()
        self._files = DriverFiles(encoded, score, list(ahead), attached)

    @property
    def sends(self) -> bool:
        """Whether the ranks upload the checkpoint that has just begun as soon as they have written it."""
        return self.progress.uploading is not None and self.progress.uploading == self.progress.writing

    def advance(self, ranks: Sequence[RankStatus]) -> bool:
        """Commits what every rank is done with; says whether a checkpoint was committed locally. Raises
        StorageError, and CheckpointError where a rollout log that it needs could not be written. The store's
        commit is made in a thread; `poll` takes in how it ended."""
        self.poll()
        committed = False
        step = self.progress.writing
        if step is not None and self._logged() and all(step in rank.written for rank in ranks):
            self.schedule.write_s = max(rank.seconds["write"] for rank in ranks)
            committed = self._commit(step, [record for rank in ranks for record in rank.written[step]])
        # The upload of a step is committed after its local commit, and one at a time.
        step = self.progress.uploading
        if step is None or self._store is None or step == self.progress.writing or self._store.busy:
            return committed
        if all(step in rank.sent for rank in ranks):
            sent = [record for rank in ranks for record in rank.sent[step]]
            if all(record.uploaded for record in sent):
                upload_s = max(rank.seconds["upload"] for rank in ranks)
                self.schedule.save_s = self.schedule.write_s + upload_s
            self._store.commit(step, sent)
        return committed

    def _logged(self) -> bool:
        return self._logs is None or self._files is None or self._logs.durable(self._files.ahead)

    def _commit(self, step: int, records: Sequence[FileRecord]) -> bool:
        """Writes the local manifest; then retention. Returns whether it could."""
        folder = self.folder / step_name(step)
        folder.mkdir(parents=True, exist_ok=True)
        if not self._store:
            self.place.check()
            self.place.go_on_from(self.progress.resumed_from)
        try:
            manifest = self._write_manifest(step, folder, records)
        except OSError as error:
            self.failed(f"the commit of step {step} failed: {error}")
            return False
        self.schedule.checkpoint_bytes = manifest["bytes"]
        self.progress.writing = None
        self.progress.committed = step
        if not self._store:
            self.schedule.save_s = self.schedule.write_s
            self.progress.failures_in_a_row = 0
            self.retention.committed(step)
        self.retention.prune_local()
        return True

    def _write_manifest(self, step: int, folder: Path, records: Sequence[FileRecord]) -> dict[str, Any]:
        """Writes the driver's files of a checkpoint, and last its manifest. Raises OSError."""
        files = self._files
        assert files is not None
        own = [FileRecord("state.json", *write_file(folder / "state.json", [files.state]))]
        for path, size in files.attached:
            with open(path, "rb") as file:
                own.append(FileRecord(path.name, *write_file(folder / path.name, [file.read(size)])))
        about = self._about | ({"ahead": files.ahead} if files.ahead else {})
        manifest = manifest_of(self.place.config, step, [*records, *own], files.score, about)
        write_file(folder / "manifest.json", [pack(manifest)])
        return manifest

    def failed(self, error: object) -> None:
        """A rank could not write: the checkpoint is dropped, told, and tried again after the next step.
        Raises StorageError when that has happened MAX_FAILURES times in a row."""
        if self.progress.uploading == self.progress.writing:
            self.progress.uploading = None
        self.progress.writing = None
        self.schedule.repeats = True
        self.progress.count_failure(error, self.place.say)

    def poll(self) -> None:
        """Takes in the result of the store's commit. Raises StorageError as `failed` does."""
        if self._store:
            self._store.poll()

    def to_send(self) -> int | None:
        """The step that the ranks are to upload now: the newest committed one, if the store lacks it and none
        is going. Call it once per step: after a failed upload it asks for another. None: nothing to do."""
        self.poll()
        progress = self.progress
        if self._store is None or progress.uploading is not None:
            return None
        if (progress.committed or 0) <= progress.stored:
            return None
        progress.uploading = progress.committed
        # The process before this one wrote it, so its ranks cannot send it.
        if self._usable is not None and self._usable.step == progress.committed:
            self._store.push(self._usable)
            return None
        return progress.uploading

    @property
    def busy(self) -> bool:
        self.poll()
        return self.progress.writing is not None or self.progress.uploading is not None

    def close(self) -> None:
        """Waits for what is being committed (a later commit is possible)."""
        if self._store:
            self._store.close()

    def metrics(self) -> dict[str, float]:
        """Figures of the last checkpoint; they may differ between equal runs."""
        return self.schedule.metrics() | {"perf/checkpoint_failures": float(self.progress.failures)}

    # --- resume ---------------------------------------------------------------------------------------------

    def find(self, before: int | None = None) -> FoundCheckpoint | None:
        """The newest committed checkpoint, local or remote, that is whole; None if there is none (or resume:
        never).

        before: only steps below this one (after a CorruptCheckpoint). Local files are compared with their
        sha256 here, remote ones by size here and by sha256 when they are fetched. Tells which checkpoints it
        passed over and why. A checkpoint that a kill left committed locally only is sent to the store beside
        the run's start. Raises ConfigError if the checkpoint belongs to another configuration or dataset,
        naming the difference.
        """
        place, progress = self.place, self.progress
        config = place.config
        # `never` is for a start; what this run has committed since is its own.
        if progress.committed is not None and config.checkpoint.resume == "never":
            config = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
        data = self._about["data_fingerprint"]
        usable, self._stale = find_checkpoint(config, data, place.storage, before, place.say, place.past)
        if usable is not None:
            self._usable = usable
            self.schedule.last_begun = usable.step
            self.schedule.checkpoint_bytes = usable.manifest["bytes"]
            progress.committed = progress.resumed_from = usable.step
            progress.stored = usable.step if usable.url else 0
            self.retention.resumed(usable.step, committed=bool(usable.url) or not progress.has_store)
            self.to_send()
        return usable

    def restore(
        self, load: Callable[[FoundCheckpoint], T], first: FoundCheckpoint | None = None
    ) -> tuple[FoundCheckpoint, T] | None:
        """Loads `first` or what `find` finds, an older one on CorruptCheckpoint. None: from scratch."""
        source = first or self.find()
        while source is not None:
            try:
                return source, load(source)
            except CorruptCheckpoint as error:
                self.place.say(f"{error}; falling back to the checkpoint before")
                source = self.find(source.step)
        return None
