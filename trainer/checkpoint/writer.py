"""The writer in every rank: training waits for the copy, then one thread writes and hashes, and another
uploads.

Writing and uploading are apart, so that the driver can commit what is whole on the disk without waiting for
the store, and the next checkpoint can be written while the store is slow or away. One checkpoint at a time in
each of the two.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.format import Shard, write_shards
from trainer.checkpoint.layout import held_bytes, local_dir, remote_folder, remote_url, step_name, step_of
from trainer.checkpoint.manifest import CheckpointError, FileRecord, rank_stem
from trainer.checkpoint.staging import HostMemory
from trainer.config import RunConfig
from trainer.storage.storage import Storage


@dataclass(frozen=True)
class RankStatus:
    """What one rank has finished lately: {step: records of its files}."""

    written: dict[int, list[FileRecord]]
    """Whole on the rank's disk."""
    sent: dict[int, list[FileRecord]]
    """The upload is over; each record says whether it worked."""
    seconds: dict[str, float]
    """What the last "write" and the last "upload" took."""


class ShardWriter:
    """One rank's writer. `start` and `send` return at once."""

    def __init__(self, config: RunConfig, rank: int, world_size: int, *, storage: Storage | None = None):
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.folder = local_dir(config)
        url = remote_url(config)
        self.storage = storage or (Storage(url) if url else None)
        self.seconds: dict[str, float] = {}
        self._writing: threading.Thread | None = None
        self._sending: threading.Thread | None = None
        self._written: dict[int, list[FileRecord]] = {}
        self._sent: dict[int, list[FileRecord]] = {}
        self._error: BaseException | None = None
        self._memory = HostMemory()
        self._attempt = ""
        self._proven: set[str] = set()
        """Names of files of which the store was seen to keep what it was sent: once in a run."""

    def host(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """A flat host copy of `tensor` in a buffer that is kept for the next checkpoint. The buffer's pages
        are locked behind the first one, if the tensor is on a GPU. Waits for the checkpoint that is being
        written, since that reads the same buffers."""
        self._join()
        flat = tensor.detach().reshape(-1)
        return self._memory.like(key, flat).copy_(flat)

    def start(
        self,
        step: int,
        shards: dict[str, Shard],
        extra: dict[str, Any],
        keep: Iterable[int] | None = None,
        send: bool = True,
        attempt: str = "",
    ) -> None:
        """Begins to write the checkpoint of `step` from host tensors that nobody changes until it is written.

        keep: steps whose local files of this rank stay; other steps' go first (None: nothing goes). send:
        upload it as soon as it is written. attempt: whose folder in the store it goes to
        (`Checkpoints.attempt`). Raises CheckpointError if the disk budget would not hold it, before anything
        is written.
        """
        self._join()
        self._error, self._attempt = None, attempt
        for done in (self._written, self._sent):
            done.pop(step, None)
        if keep is not None:
            self._prune({step, *keep})
        size = sum(t.numel() * t.element_size() for shard in shards.values() for t in shard.tensors.values())
        room = disk_room(self.folder, self.config.checkpoint.max_disk_gib)
        beside = min(self.world_size, self.config.placement.workers_per_node)
        begun = sum(path.stat().st_size for path in (self.folder / step_name(step)).glob("rank-*"))
        if size * beside - begun > room:
            raise CheckpointError(
                f"no room for the checkpoint of step {step}: {beside} ranks x {size / 2**30:.2f} GiB, "
                f"{max(room, 0) / 2**30:.2f} GiB free in {self.folder}: "
                "lower checkpoint.keep_last, raise checkpoint.max_disk_gib or take a larger disk"
            )
        self._writing = _thread("checkpoint", self._write, step, shards, extra, send)

    def send(self, step: int) -> None:
        """Begins to upload what this rank has written of `step`; what the store already has is not sent
        again."""
        assert step in self._written, f"rank {self.rank} has not written step {step}"
        self._sent.pop(step, None)
        self._sending = _thread("upload", self._upload, step, self._sending)

    def status(self) -> RankStatus:
        """What is finished. Raises CheckpointError if the local write failed. A failed upload does not raise:
        its records say `uploaded=False` and why, and the local checkpoint still counts."""
        if self._writing is None or not self._writing.is_alive():
            self._join()
            if self._error is not None:
                error, self._error = self._error, None
                raise CheckpointError(f"rank {self.rank} could not write its checkpoint: {error}") from error
        return RankStatus(dict(self._written), dict(self._sent), dict(self.seconds))

    def wait(self) -> RankStatus:
        self._join()
        if self._sending is not None:
            self._sending.join()
        return self.status()

    def _join(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _write(self, step: int, shards: dict[str, Shard], extra: dict[str, Any], send: bool) -> None:
        folder = self.folder / step_name(step)
        try:
            begun = time.monotonic()
            folder.mkdir(parents=True, exist_ok=True)
            records = write_shards(folder, self.rank, self.world_size, step, shards, extra)
            self.seconds["write"] = time.monotonic() - begun
            self._written[step] = records
        except BaseException as error:
            self._error = error
            for path in folder.glob(f"{rank_stem(self.rank, self.world_size)}*"):
                path.unlink(missing_ok=True)
            return
        for old in sorted(self._written)[:-4]:
            self._written.pop(old)
        if send and self.storage:
            self.send(step)
        self._memory.lock_behind()

    def _upload(self, step: int, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        assert self.storage is not None
        begun, folder = time.monotonic(), self.folder / step_name(step)
        inside = remote_folder(step, self._attempt)
        records = []
        for record in self._written[step]:
            proves = record.name not in self._proven
            sent = upload_file(self.storage, folder, inside, record, proves)
            if sent.uploaded:
                self._proven.add(record.name)
            records.append(sent)

        self.seconds["upload"] = time.monotonic() - begun
        self._sent[step] = records
        for old in sorted(self._sent)[:-4]:
            self._sent.pop(old)

    def _prune(self, keep: set[int]) -> None:
        names = {step_name(step) for step in keep}
        for folder in self.folder.glob("step-*"):
            if step_of(folder.name) is not None and folder.name not in names:
                for path in folder.glob(f"{rank_stem(self.rank, self.world_size)}*"):
                    path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _thread(name: str, action: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=action, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


def upload_file(
    storage: Storage, folder: Path, inside: str, record: FileRecord, proves: bool = False
) -> FileRecord:
    """Uploads one file of a checkpoint to `inside` unless it is already there. The record says whether it
    worked. proves: some of it is read back and compared."""
    key = f"{inside}/{record.name}"
    try:
        storage.put(folder / record.name, key, sha256=record.sha256)
        if proves:
            storage.check_kept(folder / record.name, key)
    except Exception as error:  # of the store, the credentials or the disk: the driver counts and tells it
        return replace(record, error=str(error))
    return replace(record, uploaded=True, error="")


def disk_room(folder: Path, max_disk_gib: float) -> int:
    """Bytes that checkpoints may still take: the budget less what they hold, or the disk's free space less 5%
    of it."""
    folder.mkdir(parents=True, exist_ok=True)
    usage = shutil.disk_usage(folder)
    room = usage.free - usage.total // 20
    if max_disk_gib > 0:
        room = min(room, int(max_disk_gib * 2**30) - held_bytes(folder))
    return room
