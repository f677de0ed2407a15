"""A rank's part in publishing weights: what changed of its own ZeRO-3 shard, without a gather."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.config.run_store import RunStore
from trainer.fleet import patch
from trainer.fleet.mirror import digest
from trainer.fleet.objects import patch_key
from trainer.learning.learner_part import LearnerPart
from trainer.ranks.process import RankProcess
from trainer.storage.storage import Storage


@dataclass(frozen=True)
class OpenedShard:
    """What a rank holds when an attempt begins."""

    layout: list[tuple[str, int, int]]
    """(name, start, stop) of its pieces, in the order of its patches."""
    digest: str
    """sha256 of their content."""
    nbytes: int


class PublisherPart:
    """A part of a `RankProcess` beside its `LearnerPart`. No method is collective."""

    def __init__(self, process: RankProcess) -> None:
        self.process = process
        self.learner = process.part(LearnerPart)
        store = RunStore.of(process.config)
        assert store is not None, "fleet.workers without checkpoint.remote is refused before"
        self.storage = Storage(store.fleet)
        self._published: list[Tensor] = []
        """The shard as workers have it, on the host."""

    def open(self) -> OpenedShard:
        """Takes the weights as they stand for published: workers find them whole elsewhere."""
        self.learner.policy.reload()  # no engine takes turns with the policy
        pieces = self.learner.policy.partition.pieces()
        self._published = [_on_host(piece.values) for piece in pieces]
        layout = [(piece.name, piece.start, piece.stop) for piece in pieces]
        nbytes = sum(tensor.nbytes for tensor in self._published)
        return OpenedShard(layout, digest(self._published), nbytes)

    @torch.no_grad()
    def publish(self, version: int, attempt: str, with_digest: bool) -> dict[str, Any]:
        """Sends what changed since the version before; returns this rank's entry in the manifest.

        Raises StorageError; then the version does not exist.
        """
        now = [piece.values for piece in self.learner.policy.partition.pieces()]
        data = patch.encode(self._published, now)
        key = patch_key(attempt, version, self.process.rank)
        self.storage.put_bytes(key, data)  # unsigned: the signed manifest has its sha256
        for before, after in zip(self._published, now, strict=True):
            before.copy_(after)
        return {
            "key": key,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "digest": digest(self._published) if with_digest else "",
        }


def _on_host(values: Tensor) -> Tensor:
    """A copy in host memory, page-locked where it comes from a GPU."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return host.copy_(values)
