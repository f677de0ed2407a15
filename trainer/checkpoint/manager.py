"""The driver's side of checkpoints: when one is due, its commit, retention, and finding the one to resume
from.

The commit point is `manifest.json`, written last; readers ignore a folder without one. A checkpoint is
committed twice: on the disk as soon as every rank has written its files, and in the object store once every
rank has uploaded them. An older checkpoint goes only after the new one is committed in the store.

    if checkpoints.due(step, step_time_s):
        checkpoints.begin(step, state)                      # state is frozen here
        keep, to = checkpoints.local_steps(), checkpoints.attempt
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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainer.checkpoint.attempt import Attempt
from trainer.checkpoint.find import find_checkpoint
from trainer.checkpoint.format import encode_state, write_file
from trainer.checkpoint.history import CheckpointCourse
from trainer.checkpoint.layout import local_dir, remote_folder, remote_url, step_name
from trainer.checkpoint.manifest import FileRecord, manifest_of, manifests_here, manifests_there, pack
from trainer.checkpoint.reader import CorruptCheckpoint, FoundCheckpoint
from trainer.checkpoint.retention import Keep, drop, make_room, prune_local, prune_remote, tidying, withdraw
from trainer.checkpoint.rollout_log import RolloutLog
from trainer.checkpoint.writer import RankStatus, disk_room, upload_file
from trainer.config import RunConfig, of_teacher
from trainer.hardware.save_interval import save_interval_s
from trainer.storage import hub
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError

T = TypeVar("T")
MAX_FAILURES = 3
"""Checkpoints that may fail in a row before the run stops: it would continue unprotected."""


def _say(text: str) -> None:
    print(f"checkpoint: {text}", file=sys.stderr, flush=True)


class Checkpoints:
    """Commits, keeps and finds the checkpoints of one run.

    data_fingerprint: of the dataset that is trained on. held: the right to write for this run; without it
    there is none to lose (reading, tests of one writer). logs: where the run samples ahead, a checkpoint is
    committed after the logs that it needs, on the disk and in the store. Raises StorageError from `advance`
    and `failed` after MAX_FAILURES failures in a row; before that a failure is told, counted, and the next
    step tries again. Raises Fenced from wherever it would have written or deleted after a newer attempt has
    started.
    """

    def __init__(
        self,
        config: RunConfig,
        data_fingerprint: str = "",
        *,
        held: Attempt | None = None,
        logs: RolloutLog | None = None,
        storage: Storage | None = None,
        say: Callable[[str], None] = _say,
    ):
        self.config = config
        self._logs = logs
        self.data_fingerprint = data_fingerprint
        self._say = say
        self.attempt = held.name if held else ""
        """Folder of this attempt within every step's in the store."""
        self._check: Callable[[], None] = held.check if held else lambda: None
        self._course = CheckpointCourse(config if held or storage is None else None, held)
        self.folder = local_dir(config)
        self.url = remote_url(config)
        self.storage = storage or (Storage(self.url) if self.url else None)
        self.in_flight: int | None = None
        """Step that the ranks are writing."""
        self.uploading: int | None = None
        """Step that the ranks are uploading (or will, once it is written)."""
        self.committed: int | None = None
        """Newest step that a resume on this disk finds."""
        self.stored: int = 0
        """Newest step that this run knows to be committed in the store."""
        self.write_s = 0.0
        """Seconds that the ranks needed to write the last checkpoint."""
        self.save_s = 0.0
        """The same, together with the seconds of the upload where there is a store."""
        self.stall_s = 0.0
        """Seconds that training stood still for the last checkpoint. The caller sets it after the ranks
        have copied."""
        self.interval_steps = max(1, config.checkpoint.every_steps)
        self.failures = 0
        self.failures_in_a_row = 0
        self.last_begun = 0
        self.trouble = 0
        """Step of the first alarm of a guard that lasts; 0: none. The loop sets it."""
        self._retry = False
        self._bytes = 0
        self._pending: dict[str, Any] = {}
        self._remote: Future | None = None
        self._found: FoundCheckpoint | None = None
        self._fingerprints = {"model_fingerprint": hub.model_fingerprint(config)}
        if config.teaches:
            self._fingerprints["teacher_fingerprint"] = hub.model_fingerprint(of_teacher(config))
        kept = max(config.checkpoint.keep_last, config.checkpoint.keep_last_remote)
        self._commits: deque[int] = deque(maxlen=kept)
        self._stale: list[int] = []
        self._pool: ThreadPoolExecutor | None = None

    # --- when -----------------------------------------------------------------------------------------------

    def due(self, step: int, step_time_s: float, last: bool = False) -> bool:
        """Whether to save after `step`. One is written at a time; beside an upload only where the disk has
        room for it.

        With every_steps 0 the first step is saved, to measure, and then as Daly's formula says. last: the run
        ends. Raises StorageError after MAX_FAILURES failures in a row.
        """
        self.poll()
        if self.in_flight is not None or not self._wanted(step, step_time_s, last):
            return False
        return self.uploading is None or self._make_room() >= self._share

    def _wanted(self, step: int, step_time_s: float, last: bool) -> bool:
        if last or self._retry:
            return step != self.last_begun or self._retry
        if self.config.checkpoint.every_steps == 0 and step_time_s > 0:
            if self.last_begun == 0 or self.save_s == 0:
                return step != self.last_begun
            mtbf_s = self.config.checkpoint.mean_time_between_preemptions_s
            wanted_s = max(save_interval_s(max(self.stall_s, 0.001), mtbf_s), self.save_s)
            steps = max(1, round(wanted_s / step_time_s))
            if abs(steps - self.interval_steps) > 0.25 * self.interval_steps:
                self._say(
                    f"saving every {steps} steps ({steps * step_time_s:.0f} s): a save stalls"
                    f" {self.stall_s:.2f} s and commits after {self.save_s:.1f} s, one preemption in"
                    f" {mtbf_s:.0f} s"
                )
                self.interval_steps = steps
        if step - self.last_begun >= self.interval_steps:
            return True
        return step % self.interval_steps == 0 and step != self.last_begun

    def fits(self, remaining_s: float) -> bool:
        """Whether a checkpoint begun now would be written in time; what is left then goes to the store.

        What has not been measured is tried: nothing is lost by a save that the kill cuts off.
        """
        # The one that is being written comes first.
        writes = 2 if self.in_flight is not None else 1
        return writes * 1.3 * self.write_s + 0.5 < remaining_s

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
        """Opens the checkpoint of `step` before the ranks write.

        state: JSON values, tensors, arrays, bytes; read back as `Found.state`. score: held-out score for
        keep_best. attach: append-only files of the run (metrics.jsonl) that a resume on a fresh node needs.
        ahead: steps after it whose completions older weights have sampled: it needs their rollout logs.
        """
        assert self.in_flight is None, "one checkpoint at a time"
        self._retry = False
        for stale in self._stale:
            drop(self.folder / step_name(stale))
        (self.folder / step_name(step) / "manifest.json").unlink(missing_ok=True)
        if self.storage and self._stale:  # passed over on resume: what follows replaces them
            self._submit(withdraw, self.storage, set(self._stale), self._check, self._say)
        # What an attempt left that was cut off may be of other ranks.
        for path in (self.folder / step_name(step)).glob("rank-*"):
            path.unlink(missing_ok=True)
        self._stale = []
        self._make_room()
        self.in_flight = step
        self.last_begun = step
        if self.storage and self.uploading is None:
            self.uploading = step
        # Attached files may grow: what they hold now is saved.
        attached = [(path, path.stat().st_size) for path in map(Path, attach) if path.is_file()]
        self._pending = {
            "state": json.dumps(encode_state(state), sort_keys=True).encode(),
            "score": score,
            "ahead": list(ahead),
            "attach": attached,
        }

    @property
    def sends(self) -> bool:
        """Whether the ranks upload the checkpoint that has just begun as soon as they have written it."""
        return self.uploading is not None and self.uploading == self.in_flight

    def advance(self, ranks: Sequence[RankStatus]) -> bool:
        """Commits what every rank is done with; says whether a checkpoint was committed locally. Raises
        StorageError, and CheckpointError where a rollout log that it needs could not be written.

        The store's commit is made in a thread; `poll` takes in how it ended.
        """
        self.poll()
        committed = False
        step = self.in_flight
        if step is not None and self._logged() and all(step in rank.written for rank in ranks):
            self.write_s = max(rank.seconds["write"] for rank in ranks)
            records: list[FileRecord] = []
            for rank in ranks:
                records += rank.written[step]
            committed = self._commit(step, records)
        # The upload of a step is committed after its local commit, and one at a time.
        step = self.uploading
        waits = step == self.in_flight or self._remote is not None
        if step is not None and not waits and all(step in rank.sent for rank in ranks):
            self._commit_upload(step, ranks)
        return committed

    def _commit_upload(self, step: int, ranks: Sequence[RankStatus]) -> None:
        """Starts the store's commit of a step that every rank has sent."""
        records: list[FileRecord] = []
        for rank in ranks:
            records += rank.sent[step]
        if all(record.uploaded for record in records):
            self.save_s = self.write_s + max(rank.seconds["upload"] for rank in ranks)
        self._remote = self._submit(self._store, step, records)

    def _logged(self) -> bool:
        """Whether the rollout logs that the checkpoint in flight needs are there."""
        return self._logs is None or self._logs.durable(self._pending["ahead"])

    def _commit(self, step: int, records: Sequence[FileRecord]) -> bool:
        """Writes the local manifest; then retention. Returns whether it could."""
        folder = self.folder / step_name(step)
        folder.mkdir(parents=True, exist_ok=True)
        if not self.storage:
            self._check()
            self._course.go_on_from(self._found.step if self._found else 0)
        try:
            own = [FileRecord("state.json", *write_file(folder / "state.json", [self._pending["state"]]))]
            for path, size in self._pending["attach"]:
                with open(path, "rb") as file:
                    own.append(FileRecord(path.name, *write_file(folder / path.name, [file.read(size)])))
            about: dict[str, Any] = {"attempt": self.attempt, "data_fingerprint": self.data_fingerprint}
            about["before"] = self.config.checkpoint.before
            about |= self._fingerprints
            if self._pending["ahead"]:
                about["ahead"] = self._pending["ahead"]
            manifest = manifest_of(self.config, step, [*records, *own], self._pending["score"], about)
            write_file(folder / "manifest.json", [pack(manifest)])
        except OSError as error:
            self.failed(f"the commit of step {step} failed: {error}")
            return False
        self._bytes = manifest["bytes"]
        self.in_flight = None
        self.committed = step
        if not self.storage:
            self.save_s = self.write_s
            self.failures_in_a_row = 0
            self._commits.append(step)
        self._prune_local()
        return True

    def failed(self, error: object) -> None:
        """A rank could not write: the checkpoint is dropped, told, and tried again after the next step.

        Raises StorageError when that has happened MAX_FAILURES times in a row.
        """
        if self.uploading == self.in_flight:
            self.uploading = None
        self.in_flight = None
        self._retry = True
        self._count_failure(error)

    def _count_failure(self, error: object) -> None:
        self.failures += 1
        self.failures_in_a_row += 1
        self._say(f"{error} ({self.failures_in_a_row} in a row)")
        if self.failures_in_a_row >= MAX_FAILURES:
            raise StorageError(
                f"{self.failures_in_a_row} checkpoints in a row failed, the last with: {error}"
            )

    def poll(self) -> None:
        """Takes in the result of the store's commit. Raises StorageError as `failed` does."""
        if self._remote is not None and self._remote.done():
            remote = self._remote
            self._remote = None
            self.uploading = None
            error = remote.exception()
            if error is not None:
                if not isinstance(error, StorageError | OSError):
                    raise error
                self._count_failure(error)

    def to_send(self) -> int | None:
        """The step that the ranks are to upload now: the newest committed one, if the store lacks it and none
        is going.

        Call it once per step: after a failed upload it asks for another. None: nothing to do.
        """
        self.poll()
        if self.storage is None or self.uploading is not None or (self.committed or 0) <= self.stored:
            return None
        self.uploading = self.committed
        # The process before this one wrote it, so its ranks cannot send it.
        if self._found is not None and self._found.step == self.committed:
            self._remote = self._submit(self._push, self._found)
            return None
        return self.uploading

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written, uploaded, or committed to the store."""
        self.poll()
        return self.in_flight is not None or self.uploading is not None

    @property
    def safe(self) -> int:
        """Newest step that is committed where it has to be: in the store, or on the disk without one."""
        return self.stored if self.storage else self.committed or 0

    @property
    def floor(self) -> int:
        """Oldest step that `keep_last` and `keep_last_remote` keep for a resume; 0: none."""
        return self._commits[0] if len(self._commits) == self._commits.maxlen else 0

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

    def _store(self, step: int, records: list[FileRecord]) -> None:
        """Commits a step whose rank files are in the store."""
        assert self.storage is not None
        lost = [record for record in records if not record.uploaded]
        if lost:
            raise StorageError(f"step {step} is committed locally only: {lost[0].name}: {lost[0].error}")
        manifest = manifests_here(self.folder)[step]
        self._send(step, self.folder / step_name(step), manifest, {record.name for record in records})

    def _send(self, step: int, folder: Path, manifest: dict[str, Any], sent: set[str]) -> None:
        """Uploads the files of a checkpoint but those in `sent`, and last its manifest; then retention."""
        assert self.storage is not None
        self._check()
        inside = remote_folder(step, manifest.get("attempt", ""))
        for entry in manifest["files"]:
            if entry["name"] in sent:
                continue
            record = upload_file(self.storage, folder, inside, FileRecord(**entry))
            if not record.uploaded:
                raise StorageError(f"step {step} is committed locally only: {record.name}: {record.error}")
        there = dict(self.storage.list(inside))
        for entry in manifest["files"]:
            key = f"{inside}/{entry['name']}"
            # A listing may lag behind the store, so a file that it lacks is asked for by itself.
            if there.get(key) != entry["bytes"] and self.storage.size(key) != entry["bytes"]:
                raise StorageError(
                    f"step {step} is committed locally only: {entry['name']} is not whole in the store"
                )
        if self._logs and manifest.get("ahead"):
            self._logs.make_durable(manifest["ahead"])
        self._course.go_on_from(self._found.step if self._found else 0)
        self._check()
        # Older checkpoints are dropped for this one, so it is read back.
        self.storage.put_proven(f"{inside}/manifest.json", pack(manifest, Seal.of(self.config), inside))
        self.stored = max(self.stored, step)
        self._commits.append(step)
        self.failures_in_a_row = 0
        self._prune_local()
        busy = {self.in_flight, self.uploading}
        with tidying("older checkpoints", self._say):
            keep = self._keep(self.config.checkpoint.keep_last_remote)
            prune_remote(self.config, self.storage, keep, busy, self._check, self._course.counts)

    # --- retention ------------------------------------------------------------------------------------------

    def local_steps(self) -> list[int]:
        """Steps of the committed local checkpoints: what the writers of the ranks must keep."""
        return sorted(manifests_here(self.folder, self._course.counts))

    def _prune_local(self) -> None:
        safe = max(self.safe, self._found.step if self._found else 0)
        settings = self.config.checkpoint
        busy = {self.in_flight, self.uploading}
        keep = self._keep(settings.keep_last)
        prune_local(self.config.run_id, self.folder, keep, safe, busy, self._course.counts)

    @property
    def _share(self) -> int:
        """Bytes of a checkpoint that lie on this node."""
        return self._bytes // self.config.placement.nodes

    def _make_room(self) -> int:
        """Drops old local checkpoints, never the newest, until the next one fits. Returns the room."""
        room = partial(disk_room, self.folder, self.config.checkpoint.max_disk_gib)
        spared = self._keep(0).sound(manifests_here(self.folder))
        return make_room(self.folder, self._share, room, {self.uploading}, self._say, spared)

    def _keep(self, last: int) -> Keep:
        """What stays besides the `last` newest checkpoints."""
        settings = self.config.checkpoint
        return Keep(last, settings.keep_best, settings.keep_good, self.trouble)

    def from_before_the_trouble(self) -> int:
        """Newest checkpoint of this run from before the first alarm, here or in the store; 0: there is none,
        or no trouble."""
        steps = set(manifests_here(self.folder, self._course.counts))
        if self.storage:
            steps |= manifests_there(self.storage, self._course.counts, Seal.of(self.config))[0].keys()
        return max((step for step in steps if step < self.trouble), default=0)

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
        config = self.config
        # `never` is for a start; what this run has committed since is its own.
        if self.committed is not None and config.checkpoint.resume == "never":
            config = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
        found, self._stale = find_checkpoint(
            config, self.data_fingerprint, self.storage, before, self._say, self._course.past
        )
        if found is not None:
            self.last_begun = found.step
            self.committed = found.step
            self._found = found
            self._bytes = found.manifest["bytes"]
            self.stored = found.step if found.url else 0
            self._commits.clear()
            if found.url or not self.storage:
                self._commits.append(found.step)
            self.to_send()
        return found

    def restore(
        self, load: Callable[[FoundCheckpoint], T], first: FoundCheckpoint | None = None
    ) -> tuple[FoundCheckpoint, T] | None:
        """Loads `first` or what `find` finds, an older one on CorruptCheckpoint. None: from scratch."""
        found = first or self.find()
        while found is not None:
            try:
                return found, load(found)
            except CorruptCheckpoint as error:
                self._say(f"{error}; falling back to the checkpoint before")
                found = self.find(found.step)
        return None

    def _push(self, found: FoundCheckpoint) -> None:
        self._send(found.step, Path(found.directory), found.manifest, set())
        self._say(f"step {found.step} had been committed locally only; the store has it now")
