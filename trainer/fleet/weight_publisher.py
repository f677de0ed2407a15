"""Versions of the weights as workers find them: what an attempt begins with, and a patch of every rank for
each version, which is what changed of its own ZeRO-3 shard, without a gather."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.checkpoint import course
from trainer.checkpoint.attempt import Attempt, Attempts
from trainer.checkpoint.layout import remote_url
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.manifest import code_fingerprint, manifests_there
from trainer.config import ConfigError, RunConfig, to_dict
from trainer.config.run_store import RunStore
from trainer.fleet import objects as keys
from trainer.fleet import patch
from trainer.fleet.dispatch import Dispatcher
from trainer.fleet.fleet_records import AboutRun, Anchor, Layout, RankPatch, WeightVersion, sampling_packages
from trainer.fleet.objects import first_lineage, next_lineage, patch_key
from trainer.fleet.weight_mirror import weights_digest
from trainer.learning.learner_part import LearnerPart
from trainer.ranks.process import RankProcess
from trainer.ranks.ray_ranks import RayRanks
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError


@dataclass(frozen=True)
class OpenedShard:
    layout: list[tuple[str, int, int]]
    """(name, start, stop) of its pieces, in the order of its patches."""
    digest: str
    nbytes: int


@dataclass(frozen=True)
class PublishedShard:
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

    def open(self) -> OpenedShard:
        """Takes the weights as they stand for published: workers find them whole elsewhere."""
        self.learner.policy.states.reload()  # no engine takes turns with the policy
        pieces = self.learner.policy.partition.pieces()
        self._published = [_on_host(piece.values) for piece in pieces]
        layout = [(piece.name, piece.start, piece.stop) for piece in pieces]
        nbytes = sum(tensor.nbytes for tensor in self._published)
        return OpenedShard(layout, weights_digest(self._published), nbytes)

    @torch.no_grad()
    def publish(self, version: int, attempt: str, with_digest: bool) -> PublishedShard:
        """Begins to send what changed since the version before, once that is sent: so one patch is on its
        way, and at most one more in memory. Raises what `settle` does, of the version before."""
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


DIGEST_EVERY = 20
"""Versions between two whose content is hashed, for mirrors to compare."""
SMALL_BYTES = 256 << 20
"""Shards up to this size are hashed at every version."""
MOST_FP32_BYTES = 1 << 30
"""Largest shard of fp32 weights: their patches are as large as they are."""
KEPT_ANCHORS = 2
"""Newest checkpoints that a worker may begin with; older versions are deleted."""


class VersionPublisher:
    def __init__(
        self,
        config: RunConfig,
        ranks: RayRanks,
        attempt: Attempt,
        checkpoints: Checkpoints,
        dispatcher: Dispatcher,
        data_fingerprint: str,
    ) -> None:
        """checkpoints: the run's, with which workers may begin."""
        self.config, self.ranks = config, ranks
        self.attempt, self.dispatcher = attempt, dispatcher
        self._checkpoints = checkpoints
        self._data_fingerprint = data_fingerprint
        self.version: int | None = None
        """The newest version; None before the first."""
        self.lineages: dict[int, str] = {}
        self.patch_bytes = 0
        """Bytes of the newest version's patches, of all ranks together."""
        self._shard_bytes = 0
        self._anchors: list[Anchor] = []
        self._keys: dict[int, list[str]] = {}
        """Manifest and patches of each version that are in the bucket."""
        self._all_sent = True
        """Whether every rank has sent its part of the newest version."""

    def open(self, number: int) -> None:
        """Begins the attempt with the pretrained model, or with the checkpoint that it resumed from."""
        shards = self.ranks.all(PublisherPart.open)
        self._shard_bytes = max(shard.nbytes for shard in shards)
        if self.config.model.dtype == "fp32" and self._shard_bytes > MOST_FP32_BYTES:
            raise ConfigError(
                "fleet.workers: fp32 weights change in every element, so a version would be as large as the"
                " model: set model.dtype to bf16"
            )
        self._begin(number, [shard.layout for shard in shards], [shard.digest for shard in shards])

    def open_pretrained(self) -> None:
        """Begins the attempt with the pretrained model, which no rank holds: workers have its files."""
        self._begin(0, [], [])

    def _begin(self, number: int, layout: Layout, digests: list[str]) -> None:
        """Tells workers what they begin with. layout, digests: of each rank's shard."""
        kind: Literal["model", "checkpoint"] = "checkpoint" if number else "model"
        lineage = first_lineage(kind, number, digests)
        self.version, self.lineages = number, {number: lineage}
        self._anchors = [Anchor(kind, number, lineage, self._checkpoint_attempt(number) if number else "")]
        about = AboutRun(
            attempt=self.attempt.name,
            config=to_dict(self.config),
            code=code_fingerprint(),
            packages=sampling_packages(),
            data=self._data_fingerprint,
            layout=layout,
        )
        self.dispatcher.objects.put_record(keys.about_key(self.attempt.name), about)
        outdated = self._left_by_older_attempts()
        self.dispatcher.announce(**self._newest())
        self.dispatcher.delete(outdated)

    def _checkpoint_attempt(self, step: int) -> str:
        """The attempt that wrote the checkpoint of a step. Waits until the bucket has it. Raises StorageError
        where it does not get there."""
        while self._checkpoints.busy and self._checkpoints.progress.stored < step:
            time.sleep(0.1)
        counts = course.history_from_record(self.attempt.record, self.attempt.epoch).counts
        remote = Storage(remote_url(self.config))
        manifests, _ = manifests_there(remote, counts, self.dispatcher.objects.seal)
        if step not in manifests:
            raise StorageError(
                f"the run resumes from a checkpoint of step {step} that is on this machine only, and it could"
                f" not be sent to {remote_url(self.config)}, where rollout workers begin"
            )
        return manifests[step].get("attempt", "")

    def _left_by_older_attempts(self) -> list[str]:
        """Objects that older attempts have left and nobody needs: this one begins with whole weights, and
        samples that are needed are in the rollout log."""
        storage = self.dispatcher.objects.storage
        folders = keys.SAMPLES, keys.MAIL, keys.WEIGHTS
        outdated = [key for folder in folders for key, _ in storage.list(folder)]
        self.attempt.check()
        return outdated

    def publish(self, number: int) -> None:
        """Publishes a version: every rank begins to send what changed of its shard since the version before.
        Raises what kept a rank from sending that one."""
        assert self.version is not None
        parent, parent_lineage = self.version, self.lineages[self.version]
        with_digest = self._shard_bytes <= SMALL_BYTES or len(self.lineages) % DIGEST_EVERY == 0
        shards = self.ranks.all(PublisherPart.publish, number, self.attempt.name, with_digest)
        patches = tuple(shard.patch for shard in shards)
        digests = tuple(shard.digest for shard in shards) if with_digest else ()
        lineage = next_lineage(parent_lineage, [patch.sha256 for patch in patches])
        version = WeightVersion(number, lineage, parent, parent_lineage, patches, digests)
        self.version = number
        self.lineages[number] = lineage
        self.patch_bytes = sum(patch.bytes for patch in patches)
        self._all_sent = False
        outdated = self._advance_anchors()
        manifest = keys.version_key(number, lineage)
        patch_keys = [patch.key for patch in patches]
        self._keys[number] = [manifest, *patch_keys]
        self.dispatcher.publish(patch_keys, {manifest: version}, outdated, **self._newest())

    def _newest(self) -> dict[str, Any]:
        assert self.version is not None
        lineage = self.lineages[self.version]
        return {"version": self.version, "lineage": lineage, "anchors": tuple(self._anchors)}

    def check_sending(self) -> None:
        """Raises what keeps a rank from sending its part of the newest version, for which the trainer may be
        about to wait."""
        if not self._all_sent:
            self._all_sent = all(self.ranks.all(PublisherPart.has_sent))

    def _advance_anchors(self) -> list[str]:
        """Lets workers begin with a new checkpoint, too; returns the objects of versions before the oldest
        that they may begin with."""
        step = self._checkpoints.progress.stored
        if step in self.lineages and step != self._anchors[-1].version:
            self._anchors.append(Anchor("checkpoint", step, self.lineages[step], self.attempt.name))
        if len(self._anchors) <= KEPT_ANCHORS:
            return []
        # no unit needs an older one: a checkpoint is committed after all that older weights had sampled
        self._anchors = self._anchors[-KEPT_ANCHORS:]
        versions = [version for version in self._keys if version <= self._anchors[0].version]
        return [key for version in versions for key in self._keys.pop(version)]

    def published_keys(self) -> list[str]:
        return [key for of_version in self._keys.values() for key in of_version]
