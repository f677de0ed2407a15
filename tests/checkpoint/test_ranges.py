"""Ranks of another number read their slices of the store's files: no more than these, and never a damaged
block."""

import base64
import shutil

import pytest
import torch

from tests.checkpoint.synthetic import (
    KINDS,
    again,
    configure,
    cut,
    finish,
    piece,
    place,
    save,
    spoil_file,
    whole,
    writers,
)
from trainer.checkpoint.format import BLOCK_BYTES, BlockSums, RangedShard
from trainer.checkpoint.manifest import CorruptCheckpoint
from trainer.checkpoint.shard_reader import ShardReader
from trainer.storage.storage import Storage

WIDE = {"embed": (1500, 512), "layer": (512, 1024), "norm": (512,), "head": (1500, 512)}


def wide(checkpoints, ranks, step):
    """A checkpoint whose ranks' files have some ten blocks."""
    full = whole(step, WIDE)
    checkpoints.begin(step, {"step": step})
    for writer in ranks:
        shards = cut(full, writer.rank, writer.world_size, WIDE)
        writer.start(step, shards, {}, None, checkpoints.sends, checkpoints.attempt)
    finish(checkpoints, ranks)
    return full


def slices(rank: int, world_size: int) -> list[tuple[str, str, int, int]]:
    return [
        (kind, name, *piece(torch.Size(WIDE[name]).numel(), rank, world_size))
        for kind in KINDS
        for name in WIDE
    ]


@pytest.mark.parametrize("cuts", [[3, 1, BLOCK_BYTES - 4, 5, 2 * BLOCK_BYTES], [], [BLOCK_BYTES]])
def test_sums_do_not_depend_on_how_a_file_was_written(cuts):
    data = torch.randint(256, (sum(cuts),), dtype=torch.uint8).numpy().tobytes()
    sums = BlockSums()
    one = BlockSums()
    one.add(memoryview(data))
    at = 0
    for count in cuts:
        sums.add(memoryview(data)[at : at + count])
        at += count
    assert sums.packed() == one.packed()
    assert len(base64.b64decode(sums.packed())) == 32 * -(-len(data) // BLOCK_BYTES)


@pytest.mark.parametrize(("n", "m"), [(2, 1), (1, 2), (2, 4), (3, 2)])
def test_ranks_of_another_number_read_only_their_slices(tmp_path, told, n, m, monkeypatch):
    config = configure(tmp_path)
    full = wide(again(config, told), writers(config, n), 2)
    shutil.rmtree(tmp_path / "run")
    found = again(config, told).find()
    total, fetched = sum(3 * 4 * torch.Size(shape).numel() for shape in WIDE.values()), []
    get_range = Storage.get_range
    monkeypatch.setattr(Storage, "get_range", lambda *a: (fetched.append(a[3] - a[2]), get_range(*a))[1])
    for rank in range(m):
        fetched.clear()
        for (kind, name, start, stop), piece_ in zip(
            slices(rank, m), ShardReader(found).stream(slices(rank, m)), strict=True
        ):
            assert torch.equal(piece_, full[name][kind][start:stop])
        edges = 1 if n % m == 0 else len(KINDS) * len(WIDE)  # whole files, or a piece of every tensor of one
        assert total / m <= sum(fetched) < total / m + 2 * BLOCK_BYTES * edges
    assert not list((tmp_path / "run").rglob("*.safetensors")), "slices are kept nowhere"


def test_what_is_here_is_not_fetched(run, tmp_path, told, monkeypatch):
    config, checkpoints, ranks = run
    save(checkpoints, ranks, 2)
    found = again(config, told).find()
    monkeypatch.setattr(Storage, "get_range", lambda *_: pytest.fail("the disk has it"))
    assert torch.equal(ShardReader(found).read("master", "scale"), whole(2)["scale"]["master"])


def test_a_damaged_block_falls_back_and_one_that_is_not_read_does_no_harm(tmp_path, told):
    config = configure(tmp_path)
    full = wide(again(config, told), writers(config, 1), 2)
    wide(again(config, told), writers(config, 1), 4)
    shutil.rmtree(tmp_path / "run")
    path = place(tmp_path / "remote/test/checkpoints", 4) / "rank-00000-of-00001.safetensors"
    spoil_file(path, "flip", path.stat().st_size // 2)

    def load(rank):
        return lambda found: list(ShardReader(found).stream(slices(rank, 2)))

    found, pieces = again(config, told).restore(load(0))
    assert found.step == 2
    assert all(
        torch.equal(p, full[s[1]][s[0]][s[2] : s[3]]) for p, s in zip(pieces, slices(0, 2), strict=True)
    )
    assert any("is damaged from byte" in text and "falling back" in text for text in told)
    unharmed = ShardReader(again(config, told).find())
    assert torch.equal(unharmed.read("exp_avg", "embed", 0, 100), whole(4, WIDE)["embed"]["exp_avg"][:100])


def test_a_block_that_came_damaged_is_asked_for_once_more(tmp_path, told, monkeypatch):
    config = configure(tmp_path)
    full = wide(again(config, told), writers(config, 1), 2)
    shutil.rmtree(tmp_path / "run")
    get_range, asked = Storage.get_range, []

    def bad_once(self, key, start, stop):
        data = get_range(self, key, start, stop)
        asked.append(key)
        return data if len(asked) != 3 else data[:-1] + bytes([data[-1] ^ 1])

    reader = ShardReader(again(config, told).find())
    monkeypatch.setattr(Storage, "get_range", bad_once)
    assert torch.equal(reader.read("master", "head"), full["head"]["master"])


def test_of_a_checkpoint_without_sums_only_the_files_that_are_read_are_fetched(tmp_path, told, monkeypatch):
    """Those before there were sums."""
    config = configure(tmp_path)
    monkeypatch.setattr("trainer.checkpoint.shard_reader.BLOCK_BYTES", 0)
    save(again(config, told), writers(config, 4), 2)
    shutil.rmtree(tmp_path / "run")
    read = ShardReader(again(config, told).find()).read("master", "model.embed.weight", 0, 100)
    assert torch.equal(read, whole(2)["model.embed.weight"]["master"][:100])
    (fetched,) = (tmp_path / "run").rglob("*.safetensors")
    assert fetched.name == "rank-00000-of-00004.safetensors"


@pytest.mark.parametrize(("sums", "size"), [("", 5), ("!", 5), (base64.b64encode(bytes(32)).decode(), 8)])
def test_a_file_that_is_none_is_named(tmp_path, sums, size):
    (tmp_path / "f").write_bytes((1 << 40).to_bytes(8, "little")[:size])
    with pytest.raises(CorruptCheckpoint, match="f"):
        RangedShard(Storage(str(tmp_path)), "f", size, sums)
