"""A rank's part in publishing weights: what changed of its own ZeRO-3 shard, without a gather."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.checkpoint.attempt import Attempt, Attempts
from trainer.config.run_store import RunStore
from trainer.fleet import patch
from trainer.fleet.fleet_records import RankPatch
from trainer.fleet.mirror import weights_digest
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


@dataclass(frozen=True)
class PublishedShard:
    """What a rank publishes of a version."""

    patch: RankPatch
    digest: str
    """sha256 of its shard; empty where it was not taken."""


class PublisherPart:
    """A part of a `RankProcess` beside its `LearnerPart`. No method is collective."""

    def __init__(self, process: RankProcess) -> None:
        self.process = process
        self.learner = process.part(LearnerPart)
        store = RunStore.of(process.config)
        assert store is not None, "fleet.workers without checkpoint.remote is refused before"
        self.storage = Storage(store.fleet)
        self.attempts = Attempts.of(process.config)
        self._published: list[Tensor] = []
        """The shard as workers have it, on the host, once the newest patch is sent."""
        self._sending: threading.Thread | None = None
        self._error: Exception | None = None
        """Why the newest patch was not sent."""

    def open(self) -> OpenedShard:
        """Takes the weights as they stand for published: workers find them whole elsewhere."""
        self.learner.policy.reload()  # no engine takes turns with the policy
        pieces = self.learner.policy.partition.pieces()
        self._published = [_on_host(piece.values) for piece in pieces]
        layout = [(piece.name, piece.start, piece.stop) for piece in pieces]
        nbytes = sum(tensor.nbytes for tensor in self._published)
        return OpenedShard(layout, weights_digest(self._published), nbytes)

    @torch.no_grad()
    def publish(self, version: int, attempt: str, with_digest: bool) -> PublishedShard:
        """Begins to send what changed since the version before, once that is sent: so one patch is on its
        way, and at most one more in memory.

        Raises what `settle` does, of the version before.
        """
        now = [piece.values for piece in self.learner.policy.partition.pieces()]
        data = patch.encode_patch(self._published, now)
        self.settle()
        key = patch_key(attempt, version, self.process.rank)
        self._sending = threading.Thread(target=self._send, args=(attempt, key, data), daemon=True)
        self._sending.start()
        for before, after in zip(self._published, now, strict=True):
            before.copy_(after)
        digest = weights_digest(self._published) if with_digest else ""
        return PublishedShard(RankPatch(key, len(data), hashlib.sha256(data).hexdigest()), digest)

    def _send(self, attempt: str, key: str, data: bytes) -> None:
        try:
            Attempt(self.attempts, attempt).check()
            self.storage.put_bytes(key, data)  # unsigned: the signed manifest has its sha256
        except Exception as error:
            self._error = error

    def settle(self) -> None:
        """Waits for the newest patch to be in the store. Raises Fenced, and what `Storage` does, where it
        does not get there: then its version does not exist, and there is none after it."""
        if self._sending is not None:
            self._sending.join()
        self.has_sent()

    def has_sent(self) -> bool:
        """Whether the newest patch is in the store. Raises as `settle`, and does not wait."""
        is_sending = self._sending is not None and self._sending.is_alive()
        if self._error is not None:  # asked after that: what ends meanwhile may end with one
            raise self._error
        return not is_sending


def _on_host(values: Tensor) -> Tensor:
    """A copy in host memory, page-locked where it comes from a GPU."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return host.copy_(values)
