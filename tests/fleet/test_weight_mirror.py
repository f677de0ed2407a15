"""A machine's copy of the weights follows the trainer's: forward, back, and from an anchor."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor

from trainer.fleet import patch, weight_mirror
from trainer.fleet.fleet_records import Anchor, Layout, RankPatch, WeightVersion
from trainer.fleet.objects import Objects, first_lineage, next_lineage, patch_key, version_key
from trainer.fleet.weight_mirror import WeightMirror, WeightsDiverged, read_version, weights_digest
from trainer.storage.seal import ForgedObject, Seal
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

    def restart(self, version: int, attempt: str, layout: Layout = LAYOUT) -> None:
        """A new attempt, from a checkpoint of this version, which it calls by the content of its shards."""
        self.weights, _ = self.past[version]
        self.version, self.attempt = version, attempt
        self.layout = layout
        held = WeightMirror(self.objects, layout, self.weights, lambda anchor: None, 1 << 20, dict)
        self.lineage = first_lineage("checkpoint", version, held.digests())
        self.past = {version: (self.weights, self.lineage)}
        self.anchors = [Anchor("checkpoint", version, self.lineage, attempt)]

    def mirror(self) -> WeightMirror:
        tensors = base()

        def fill(anchor: Anchor) -> None:
            for name, tensor in self.past[anchor.version][0].items():
                tensors[name].copy_(tensor)

        return WeightMirror(self.objects, self.layout, tensors, fill, 1 << 20, tensors.items)

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
    for version, read in ((0, 1), (1, 1), (3, 1), (5, 1), (2, 2), (4, 2), (0, 3), (5, 3)):
        trainer.bring(mirror, version)
        assert trainer.holds(mirror, version), version
        assert mirror.anchors_read == read, "a worker that takes over an older unit begins anew"
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

    mirror = WeightMirror(trainer.objects, LAYOUT, tensors, fill, 1 << 20, tensors.items)
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


def watched(trainer: Trainer, monkeypatch) -> list[int]:
    """The versions whose manifests are read."""
    read: list[int] = []
    real = weight_mirror.read_version

    def reads(objects, number, lineage):
        read.append(number)
        return real(objects, number, lineage)

    monkeypatch.setattr(weight_mirror, "read_version", reads)
    return read


def test_a_checkpoint_shortens_the_way_of_who_comes_late_and_of_who_goes_back(trainer, monkeypatch):
    trainer.anchors.append(Anchor("checkpoint", 3, trainer.past[3][1], "1-aaaaaa"))
    late, follower = trainer.mirror(), trainer.mirror()
    trainer.bring(follower, 1)
    read = watched(trainer, monkeypatch)
    for mirror, version, way in ((late, 5, [5, 4]), (follower, 5, [5, 4, 3, 2]), (follower, 4, [4])):
        read.clear()
        trainer.bring(mirror, version)
        assert trainer.holds(mirror, version) and read[: len(way)] == way
    assert follower.anchors_read == 2


def test_where_older_patches_are_gone_the_checkpoint_leads_on(trainer):
    trainer.anchors.append(Anchor("checkpoint", 4, trainer.past[4][1], "1-aaaaaa"))
    follower = trainer.mirror()
    trainer.bring(follower, 1)
    trainer.objects.storage.delete([version_key(2, trainer.past[2][1]), version_key(3, trainer.past[3][1])])
    trainer.bring(follower, 5)
    assert trainer.holds(follower, 5) and follower.anchors_read == 2


@pytest.mark.parametrize(
    ("held", "changed", "layout", "reads"),
    [(3, False, LAYOUT, 0), (3, False, OTHER_LAYOUT, 0), (5, False, LAYOUT, 1), (3, True, LAYOUT, 1)],
    ids=["the checkpoint's", "shared out differently", "newer than the checkpoint", "another run's"],
)
def test_after_a_restart_of_the_trainer(trainer, held, changed, layout, reads):
    """A worker reads nothing that it holds, and nothing else may pass for it."""
    mirror = trainer.mirror()
    trainer.bring(mirror, held)
    if changed:
        mirror.tensors["norm"][0] += 1
    trainer.restart(3, "2-bbbbbb", layout)
    trainer.publish(7)
    mirror.layout = layout
    trainer.bring(mirror, 4)
    assert trainer.holds(mirror, 4) and mirror.anchors_read == 1 + reads


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

    def breaks(pieces, change):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return real(pieces, change)

    monkeypatch.setattr(patch, "apply_patch", breaks)
    with pytest.raises(MemoryError):
        trainer.bring(mirror, 4)
    assert mirror.dirty
    trainer.bring(mirror, 4)
    assert trainer.holds(mirror, 4) and mirror.anchors_read == 2
