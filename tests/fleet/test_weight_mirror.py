"""A machine's copy of the weights follows the trainer's: forward, back, over a fork, and from an anchor."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs
from torch import Tensor

from tests.checkpoint.synthetic import configure
from trainer.checkpoint.attempt import Attempts
from trainer.fleet import patch
from trainer.fleet.fleet_records import Anchor, Layout, RankPatch, WeightVersion
from trainer.fleet.objects import (
    Objects,
    first_lineage,
    next_lineage,
    patch_key,
    version_key,
    version_of,
)
from trainer.fleet.weight_mirror import WeightMirror, WeightsDiverged, read_version, weights_digest
from trainer.fleet.weight_publisher import VersionPublisher
from trainer.storage.seal import KEY_VARIABLE, ForgedObject, Seal
from trainer.storage.storage import Storage

SHAPES = {"embed": (64, 33), "norm": (1000,), "frozen": (10,)}
LAYOUT: Layout = [[("embed", 0, 1000), ("norm", 0, 500)], [("embed", 1000, 64 * 33), ("norm", 500, 1000)]]
OTHER_LAYOUT: Layout = [[("embed", 0, 64 * 33), ("norm", 0, 1000)]]
Weights = dict[str, Tensor]


def base() -> Weights:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=g).bfloat16() for name, shape in SHAPES.items()}


class Trainer:
    """Publishes versions as head and ranks do, and keeps what they are."""

    def __init__(self, folder: Path, attempt: str = "1-aaaaaa", layout: Layout = LAYOUT) -> None:
        self.objects = Objects(Storage(folder / "fleet"), Seal("run", b"0123456789abcdef"))
        self.attempt, self.layout = attempt, layout
        self.weights = base()
        self.version = 0
        self.lineage = first_lineage(
            "model", 0, [weights_digest(self.pieces(self.weights, r)) for r in (0, 1)]
        )
        self.anchors = [Anchor("model", 0, self.lineage)]
        self.past = {0: (self.weights, self.lineage)}

    def pieces(self, weights: Weights, rank: int) -> list[Tensor]:
        return [weights[name].view(-1)[start:stop] for name, start, stop in self.layout[rank]]

    def publish(self, seed: int, by: int = 1, with_digest: bool = False) -> None:
        g = torch.Generator().manual_seed(seed)
        new = {name: tensor.clone() for name, tensor in self.weights.items()}
        for name, tensor in new.items():
            hit = torch.rand(tensor.shape, generator=g) < 0.02
            if name != "frozen":
                tensor[hit] = (tensor[hit].float() * 1.01).bfloat16()
        patches = []
        for rank in range(len(self.layout)):
            data = patch.encode_patch(self.pieces(self.weights, rank), self.pieces(new, rank))
            key = patch_key(self.attempt, self.version + by, rank)
            self.objects.storage.put_bytes(key, data)
            patches.append(RankPatch(key, len(data), hashlib.sha256(data).hexdigest()))
        after = next_lineage(self.lineage, [published.sha256 for published in patches])
        sums = tuple(weights_digest(self.pieces(new, rank)) for rank in range(len(self.layout)))
        version = WeightVersion(
            self.version + by, after, self.version, self.lineage, tuple(patches), sums if with_digest else ()
        )
        self.objects.put_record(version_key(version.number, after), version)
        self.weights, self.lineage = new, after
        self.version += by
        self.past[self.version] = (new, after)

    def go_back(self, version: int, attempt: str) -> None:
        """Goes on from this version under its name."""
        self.weights, self.lineage = self.past[version]
        self.version, self.attempt = version, attempt

    def restart(self, version: int, attempt: str, layout: Layout = LAYOUT) -> None:
        """A new attempt, from a checkpoint of this version, which it calls by the content of its shards."""
        self.weights, _ = self.past[version]
        self.version, self.attempt = version, attempt
        self.layout = layout
        held = WeightMirror(self.objects, layout, self.weights, lambda anchor: None, 1 << 20)
        self.lineage = first_lineage("checkpoint", version, held.digests())
        self.past = {version: (self.weights, self.lineage)}
        self.anchors = [Anchor("checkpoint", version, self.lineage, attempt)]

    def mirror(self) -> WeightMirror:
        tensors = base()

        def fill(anchor: Anchor) -> None:
            for name, tensor in self.past[anchor.version][0].items():
                tensors[name].copy_(tensor)

        return WeightMirror(self.objects, self.layout, tensors, fill, 1 << 20)

    def holds(self, mirror: WeightMirror, version: int) -> bool:
        weights, lineage = self.past[version]
        assert mirror.lineage == lineage and mirror.version == version
        return all(torch.equal(mirror.tensors[name], weights[name]) for name in weights)

    def bring(self, mirror: WeightMirror, version: int) -> None:
        mirror.to(version, self.past[version][1], self.anchors)


@pytest.fixture
def trainer(tmp_path):
    made = Trainer(tmp_path)
    for number in range(1, 6):
        made.publish(number, with_digest=number == 5)
    return made


def test_forward_back_and_late(trainer):
    mirror = trainer.mirror()
    for version in (0, 1, 3, 5, 2, 4, 0, 5):  # a worker that takes over an older unit goes back
        trainer.bring(mirror, version)
        assert trainer.holds(mirror, version), version
    assert mirror.anchors_read == 1
    late = trainer.mirror()
    trainer.bring(late, 5)
    assert trainer.holds(late, 5)
    assert sum(len(group) for group in late.groups()) == len(SHAPES)


def test_a_model_that_was_just_loaded_is_not_read_again(trainer):
    filled = []
    tensors = base()

    def fill(anchor: Anchor) -> None:
        filled.append(anchor.kind)
        for name, tensor in base().items():
            tensors[name].copy_(tensor)

    mirror = WeightMirror(trainer.objects, LAYOUT, tensors, fill, 1 << 20, as_loaded=True)
    trainer.bring(mirror, 1)
    assert trainer.holds(mirror, 1) and filled == []
    mirror.dirty = True
    trainer.bring(mirror, 1)
    assert trainer.holds(mirror, 1)
    assert filled == ["model"], "its tensors are no longer as they were loaded"


def test_versions_may_leave_numbers_out(trainer):
    trainer.publish(9, by=3)  # steps that were replayed from the log were not published
    mirror = trainer.mirror()
    trainer.bring(mirror, 8)
    assert trainer.holds(mirror, 8)


def test_over_a_fork_the_mirror_goes_back_to_the_common_ancestor(trainer):
    mirror = trainer.mirror()
    trainer.bring(mirror, 5)
    old = trainer.past[5]
    trainer.go_back(2, "2-bbbbbb")
    trainer.publish(100)
    trainer.publish(101)
    trainer.bring(mirror, 4)
    assert trainer.holds(mirror, 4) and mirror.anchors_read == 1
    trainer.past[5] = old
    trainer.bring(mirror, 5)
    assert trainer.holds(mirror, 5)


def test_a_checkpoint_shortens_the_way_of_who_comes_late(trainer):
    trainer.anchors.append(Anchor("checkpoint", 4, trainer.past[4][1], "1-aaaaaa"))
    late, follower = trainer.mirror(), trainer.mirror()
    trainer.bring(follower, 1)
    trainer.bring(late, 5)
    trainer.bring(follower, 5)
    assert trainer.holds(late, 5) and trainer.holds(follower, 5)
    assert late.fetched_bytes < follower.fetched_bytes / 2 and follower.anchors_read == 1


def test_where_older_patches_are_gone_the_checkpoint_leads_on(trainer):
    trainer.anchors.append(Anchor("checkpoint", 4, trainer.past[4][1], "1-aaaaaa"))
    follower = trainer.mirror()
    trainer.bring(follower, 1)
    trainer.objects.storage.delete([version_key(2, trainer.past[2][1]), version_key(3, trainer.past[3][1])])
    trainer.bring(follower, 5)
    assert trainer.holds(follower, 5) and follower.anchors_read == 2


def test_a_new_attempt_may_share_the_weights_out_differently(trainer):
    mirror = trainer.mirror()
    trainer.bring(mirror, 3)
    trainer.restart(3, "2-bbbbbb", OTHER_LAYOUT)
    trainer.publish(7)
    mirror.follow(OTHER_LAYOUT)
    trainer.bring(mirror, 4)
    assert trainer.holds(mirror, 4) and mirror.anchors_read == 1


@pytest.mark.parametrize("at", [3, 5])
def test_after_a_restart_of_the_trainer_a_worker_reads_nothing_that_it_holds(trainer, at):
    mirror = trainer.mirror()
    trainer.bring(mirror, at)
    trainer.restart(3, "2-bbbbbb")
    trainer.publish(7)
    mirror.follow(LAYOUT)
    read = mirror.anchors_read
    trainer.bring(mirror, 4)
    assert trainer.holds(mirror, 4) and mirror.anchors_read == read


def test_what_another_run_s_worker_holds_is_read_anew(trainer):
    mirror = trainer.mirror()
    trainer.bring(mirror, 3)
    with torch.no_grad():
        next(iter(mirror.tensors.values())).view(-1)[0] += 1
    trainer.restart(3, "2-bbbbbb")
    mirror.follow(LAYOUT)
    trainer.bring(mirror, 3)
    assert trainer.holds(mirror, 3) and mirror.anchors_read == 2


def test_damaged_and_foreign_objects_change_nothing(trainer):
    mirror = trainer.mirror()
    trainer.bring(mirror, 3)
    storage = trainer.objects.storage
    key = patch_key("1-aaaaaa", 4, 1)
    good = storage.get_bytes(key)
    for data in (good[:-1] + b"x", b"", storage.get_bytes(patch_key("1-aaaaaa", 4, 0))):
        storage.put_bytes(key, data)
        with pytest.raises(ForgedObject):
            trainer.bring(mirror, 4)
        assert trainer.holds(mirror, 3) and not mirror.dirty
    storage.put_bytes(key, good)

    manifest = version_key(4, trainer.past[4][1])
    signed = storage.get_bytes(manifest)
    for data in (signed[:-2] + b"x}", storage.get_bytes(version_key(3, trainer.past[3][1]))):
        storage.put_bytes(manifest, data)
        with pytest.raises(ForgedObject):
            trainer.bring(mirror, 4)
        assert trainer.holds(mirror, 3)
    storage.put_bytes(manifest, signed)
    trainer.bring(mirror, 5)
    assert trainer.holds(mirror, 5)


def test_a_manifest_under_anothers_name_is_refused(trainer):
    """Signed with the run's key, so by a head with a defect."""
    version = read_version(trainer.objects, 4, trainer.past[4][1])
    forged = structs.replace(version, patches=version.patches[::-1])
    trainer.objects.put_record(version_key(4, version.lineage), forged)
    with pytest.raises(ForgedObject, match="another version"):
        read_version(trainer.objects, 4, version.lineage)


def test_one_flipped_bit_is_found_by_the_digest_and_mended_from_the_anchor(trainer):
    mirror = trainer.mirror()
    trainer.bring(mirror, 4)
    mirror.tensors["norm"].view(torch.int16)[700] ^= 1
    with pytest.raises(WeightsDiverged):
        trainer.bring(mirror, 5)
    trainer.bring(mirror, 5)
    assert trainer.holds(mirror, 5) and mirror.anchors_read == 2


def test_what_breaks_off_within_a_patch_is_read_anew(trainer, monkeypatch):
    mirror = trainer.mirror()
    trainer.bring(mirror, 3)
    real, calls = patch.apply_patch, []

    def breaks(pieces, change, sign=1):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return real(pieces, change, sign)

    monkeypatch.setattr(patch, "apply_patch", breaks)
    with pytest.raises(MemoryError):
        trainer.bring(mirror, 4)
    assert mirror.dirty
    trainer.bring(mirror, 4)
    assert trainer.holds(mirror, 4) and mirror.anchors_read == 2


def test_a_new_attempt_leaves_what_workers_need_to_go_back(tmp_path, monkeypatch):
    """Patches behind its checkpoint, until a version that follows it has two checkpoints behind it."""
    monkeypatch.setenv(KEY_VARIABLE, "0123456789abcdef0123456789abcdef")
    config = configure(tmp_path, "fleet.workers=only")
    trainer = Trainer(tmp_path / "remote/test")
    for number in range(1, 6):
        trainer.publish(number)
    trainer.objects.storage.put_bytes("mail/1-aaaaaa/w0.json", b"old")
    mirror = trainer.mirror()
    trainer.bring(mirror, 5)
    held = Attempts.of(config).take(3)
    head = SimpleNamespace(objects=trainer.objects)
    publisher = VersionPublisher(config, None, held, None, head, "")  # ty: ignore[invalid-argument-type]
    trainer.objects.storage.delete(publisher._left_by_older_attempts(3))
    left = [key for key, _ in trainer.objects.storage.list()]
    assert {version_of(key) for key in left} == {4, 5} and len(left) == 2 * 3
    trainer.restart(3, "2-bbbbbb")
    read = mirror.anchors_read
    trainer.bring(mirror, 3)
    assert trainer.holds(mirror, 3) and mirror.anchors_read == read
    assert {version_of(key) for key in publisher._drop_keys_to(4)} == {4}
    assert {version_of(key) for key in publisher._drop_keys_to(9)} == {5}
    assert publisher._drop_keys_to(9) == []


@pytest.mark.parametrize(
    "key", ["weights/x.json", "weights/1-a/00.patch", "weights", "weights/²³⁴⁵⁶⁷⁸⁹.json"]
)
def test_a_name_that_is_no_version_s_is_that_of_none(key):
    assert version_of(key) == 0
