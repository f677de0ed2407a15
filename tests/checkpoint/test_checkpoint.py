"""Checkpoints on real disks and stores: format, elastic reads, commit point, fall-back, refusal."""

import hashlib
import json
import pickle
import random
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.synthetic import (
    SHAPES,
    again,
    attempt,
    configure,
    cut,
    cut_whole,
    finish,
    holds,
    place,
    save,
    spoil,
    whole,
    writers,
)
from trainer.checkpoint import shard_reader
from trainer.checkpoint.format import CheckpointError, decode_state, encode_state
from trainer.checkpoint.manifest import pack, unpack
from trainer.checkpoint.shard_reader import CorruptCheckpoint, ShardReader, fetch_rank
from trainer.config import ConfigError, override

# --- format -------------------------------------------------------------------------------------------------


def test_values_survive_encoding():
    torch.manual_seed(3)
    state = {
        "torch": torch.get_rng_state(),
        "python": random.Random(4).getstate(),
        "numpy": np.arange(5, dtype=np.float32),
        "bf16": torch.randn(2, 3).bfloat16(),
        "empty": torch.empty(0),
        "nested": [{"a": None, "b": 1.5, "c": b"\x00\xff"}],
    }
    back = decode_state(json.loads(json.dumps(encode_state(state))))
    assert torch.equal(back["torch"], state["torch"])
    assert torch.equal(back["bf16"], state["bf16"])
    assert back["bf16"].dtype == torch.bfloat16
    assert back["empty"].shape == (0,)
    assert (back["numpy"] == state["numpy"]).all()
    assert back["nested"] == state["nested"]
    twin = random.Random()
    twin.setstate(back["python"])
    assert twin.random() == random.Random(4).random()
    with pytest.raises(TypeError, match="object"):
        encode_state({"x": object()})


def test_shards_are_plain_safetensors(run, tmp_path):
    config, checkpoints, ranks = run
    save(checkpoints, ranks, 2)
    folder = tmp_path / "run/checkpoints/step-00000002"
    first = load_file(folder / "rank-00000-of-00002.safetensors")
    second = load_file(folder / "rank-00001-of-00002.safetensors")
    full = whole(2)
    for name in SHAPES:
        both = torch.cat([first[f"exp_avg/{name}"], second[f"exp_avg/{name}"]])
        assert torch.equal(both, full[name]["exp_avg"])
    remote = place(tmp_path / "remote/test/checkpoints", 2)
    assert {p.name for p in folder.iterdir()} == {p.name for p in remote.iterdir() if p.suffix != ".sha256"}


def test_large_shards_are_cut_into_files(run, monkeypatch):
    config, checkpoints, ranks = run
    monkeypatch.setattr("trainer.checkpoint.format.FILE_BYTES", 2000)
    save(checkpoints, ranks, 2)
    found = checkpoints.find()
    assert found
    assert any(entry["name"] == "rank-00001-of-00002.2.safetensors" for entry in found.manifest["files"])
    assert holds(found, 2)


# --- elastic ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(2, 1), (1, 2), (2, 4), (4, 2), (3, 5), (2, 2)])
def test_n_ranks_write_and_m_ranks_read(tmp_path, told, n, m):
    config = configure(tmp_path)
    checkpoints = again(config, told)
    save(checkpoints, writers(config, n), 2)
    found = checkpoints.find()
    assert found and found.world_size == n
    assert holds(found, 2, world_size=m)
    assert torch.equal(ShardReader(found).extra(n - 1)["rng"], torch.tensor([2, n - 1]))
    with pytest.raises(CheckpointError, match="no rank"):
        ShardReader(found).extra(n)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pieces_of_stages_1_and_2_are_read_by_stage_3(tmp_path, told, n):
    config = configure(tmp_path)
    save(attempt(config, told), writers(config, n), 2, cut=cut_whole)
    folder = tmp_path / "run/checkpoints/step-00000002"
    assert holds(folder, 2) and holds(folder, 2, world_size=3)


def test_unknown_and_missing_pieces_are_named(run):
    config, checkpoints, ranks = run
    save(checkpoints, ranks, 2)
    reader = ShardReader(checkpoints.find())
    with pytest.raises(CheckpointError, match="no parameter other"):
        reader.read("master", "other")


# --- commit, verification, fall-back ------------------------------------------------------------------------


def test_nothing_counts_before_the_manifest(run, tmp_path, told):
    config, checkpoints, ranks = run
    save(checkpoints, ranks, 2)
    checkpoints.begin(4, {})
    for writer in ranks:
        writer.start(4, cut(whole(4), writer.rank, 2), {}, attempt=checkpoints.attempt)
        writer.wait()
    assert (tmp_path / "run/checkpoints/step-00000004/rank-00001-of-00002.safetensors").exists()
    found = again(config, told).find()
    assert found and found.step == 2
    assert found.state == {"step": 2, "offset": 16}


@pytest.mark.parametrize("where", ["local", "both", "remote"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_damage_falls_back_and_says_so(run, tmp_path, told, where, damage):
    config, checkpoints, ranks = run
    for step in (2, 4):
        save(checkpoints, ranks, step)
    places = {"local": [tmp_path / "run"], "remote": [tmp_path / "remote/test"]}
    for root in places.get(where) or [tmp_path / "run", tmp_path / "remote/test"]:
        spoil(root / "checkpoints/step-00000004", damage)
    if where == "remote":
        shutil.rmtree(tmp_path / "run")
    found, _ = again(config, told).restore(
        lambda found: holds(found, found.step) or pytest.fail("wrong values")
    )
    assert found.step == (4 if where == "local" else 2)
    if where != "local" and damage != "manifest":
        assert any("falling back" in text and re.search("step 4|step-00000004", text) for text in told)


MALFORMED = {
    "no files": lambda m: m.pop("files"),
    "files of another kind": lambda m: m.update(files="rank-00000-of-00002.json"),
    "a step that is text": lambda m: m.update(step="4"),
    "another step": lambda m: m.update(step=5),
    "a negative size": lambda m: m["files"][0].update(bytes=-1),
    "no ranks": lambda m: m.update(world_size=0),
    "more ranks than files": lambda m: m.update(world_size=10**9),
    "a world size that is text": lambda m: m.update(world_size="2"),
    "a name that leads elsewhere": lambda m: m["files"][0].update(name="../../../../outside"),
    "an absolute name": lambda m: m["files"][0].update(name="/etc/passwd"),
    "an attempt that leads elsewhere": lambda m: m.update(attempt="../7-3f2c1a"),
    "no checksum": lambda m: m["files"][0].update(sha256=""),
    "a score that is text": lambda m: m.update(score="high"),
    "no configuration": lambda m: m.pop("config"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_manifest_is_no_manifest(run, tmp_path, told, what):
    """Its own checksum is right: somebody wrote it so. It is passed over, here and in the store."""
    config, checkpoints, ranks = run
    for step in (2, 4):
        save(checkpoints, ranks, step)
    for root in (tmp_path / "run/checkpoints", tmp_path / "remote/test/checkpoints"):
        path = place(root, 4) / "manifest.json"
        manifest = unpack(path.read_bytes())
        MALFORMED[what](manifest)
        path.write_bytes(pack(manifest))
    found, _ = attempt(config, told).restore(
        lambda found: holds(found, found.step) or pytest.fail("wrong values")
    )
    assert found.step == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rank-00001-of-00002.json", b"[]"),
        ("rank-00001-of-00002.json", b'{"index": {"a": [[2], -1, 2, {}]}, "files": []}'),
        ("rank-00001-of-00002.json", b'{"index": {"a": [[2], 0, "2", {}]}, "files": []}'),
        ("rank-00001-of-00002.json", b"\xff\xfe"),
        ("rank-00001-of-00002.safetensors", b"\x00" * 7),
        ("rank-00001-of-00002.safetensors", (1 << 40).to_bytes(8, "little") + b"{}"),
        ("state.json", b"not json"),
    ],
)
def test_files_that_are_no_files_of_a_checkpoint_fall_back(run, tmp_path, told, name, text):
    """The manifest lists them with their right sums: only reading them shows it."""
    config, checkpoints, ranks = run
    for step in (2, 4):
        save(checkpoints, ranks, step)
    for root in (tmp_path / "run/checkpoints", tmp_path / "remote/test/checkpoints"):
        folder = place(root, 4)
        manifest = unpack((folder / "manifest.json").read_bytes())
        (folder / name).write_bytes(text)
        for entry in manifest["files"]:
            if entry["name"] == name:
                entry.update(bytes=len(text), sha256=hashlib.sha256(text).hexdigest())
        (folder / "manifest.json").write_bytes(pack(manifest))
    found, _ = attempt(config, told).restore(
        lambda found: holds(found, found.step) or pytest.fail("wrong values")
    )
    assert found.step == 2
    assert any("falling back" in text and "step 4" in text for text in told)


def test_when_none_is_whole_it_stops_rather_than_start_afresh(run, tmp_path, told):
    config, checkpoints, ranks = run
    save(checkpoints, ranks, 2)
    for root in (tmp_path / "run", tmp_path / "remote/test"):
        spoil(root / "checkpoints/step-00000002", "cut")
    with pytest.raises(ConfigError, match="steps 2 .* none is whole"):
        again(config, told).restore(lambda found: holds(found, 2))


def test_after_a_fall_back_the_damaged_checkpoint_is_replaced(run, tmp_path, told):
    config, checkpoints, ranks = run
    for step in (2, 4):
        save(checkpoints, ranks, step)
    for root in (tmp_path / "run", tmp_path / "remote/test"):
        spoil(root / "checkpoints/step-00000004", "flip")
    second = attempt(config, told)
    assert second.restore(lambda found: [fetch_rank(found, rank, 2) for rank in (0, 1)])[0].step == 2
    save(second, writers(config, 2), 3)
    second.close()
    third = again(config, told).find()
    assert third.step == 3
    assert holds(third, 3)
    assert again(config, told).find(before=3).step == 2


def test_a_fresh_node_resumes_from_the_store_with_the_attached_files(run, tmp_path, told):
    config, checkpoints, ranks = run
    metrics = tmp_path / "run/metrics.jsonl"
    metrics.parent.mkdir(exist_ok=True)
    metrics.write_text('{"step": 1}\n')
    checkpoints.begin(2, {"metrics": 12}, attach=[metrics])
    metrics.write_text('{"step": 1}\n{"step": 2}\n')  # grows while the checkpoint is under way
    for writer in ranks:
        writer.start(2, cut(whole(2), writer.rank, 2), {}, attempt=checkpoints.attempt)
    finish(checkpoints, ranks)
    shutil.rmtree(tmp_path / "run")
    found = again(config, told).find()
    assert found.local("metrics.jsonl").read_text() == '{"step": 1}\n'
    assert holds(found, 2)


def test_a_commit_that_was_local_only_is_sent_on_resume(run, tmp_path, told):
    config, checkpoints, ranks = run
    save(checkpoints, ranks, 2)
    save(checkpoints, ranks, 4)
    there = place(tmp_path / "remote/test/checkpoints", 4)
    (there / "manifest.json").unlink()
    (there / "rank-00001-of-00002.safetensors").unlink()
    second = attempt(config, told)
    assert second.find().step == 4
    second.close()
    shutil.rmtree(tmp_path / "run")
    found = again(config, told).find()
    assert found.step == 4
    assert holds(found, 4)


def test_refuses_another_configuration_and_other_data(run, told):
    config, checkpoints, ranks = run
    save(checkpoints, ranks, 2)
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate is 0\.001, the checkpoint has 5e-07"):
        again(override(config, ["optimizer.learning_rate=1e-3"]), told).find()
    longer = override(config, ["run.max_steps=40"])
    assert again(longer, told).find().step == 2, "under a constant learning rate the run may become longer"
    with pytest.raises(ConfigError, match="not what the checkpoint was trained on"):
        again(config, told, data="other").find()
    elsewhere = override(
        config, ["placement.nodes=3", "algorithm.micro_batch_tokens=200", "checkpoint.keep_last=5"]
    )
    assert again(elsewhere, told).find().step == 2, "where and how fast may differ"


def test_refuses_another_length_where_the_learning_rate_decays_over_it(tmp_path, told):
    config = configure(tmp_path, "optimizer.schedule=cosine", "run.max_steps=20")
    save(again(config, told), writers(config, 1), 2)
    with pytest.raises(
        ConfigError, match=r"run\.max_steps is 40, the checkpoint has 20 \(optimizer\.schedule cosine"
    ):
        again(override(config, ["run.max_steps=40"]), told).find()


def test_resume_never_and_must(run, tmp_path, told):
    config, checkpoints, ranks = run
    must = override(config, ["checkpoint.resume=must"])
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        again(must, told).find()
    assert again(config, told).find() is None
    save(checkpoints, ranks, 2)
    assert again(must, told).find().step == 2
    with pytest.raises(ConfigError, match=r"choose another run\.id"):
        again(override(config, ["checkpoint.resume=never"]), told).find()


def test_resume_never_still_finds_its_own(tmp_path, told):
    config = configure(tmp_path, "checkpoint.resume=never")
    checkpoints = again(config, told)
    assert checkpoints.find() is None
    save(checkpoints, writers(config, 1), 2)
    assert checkpoints.find().step == 2, "for the export at the end"


def test_a_file_is_hashed_once_by_driver_and_ranks(run, told, monkeypatch):
    config, checkpoints, ranks = run
    save(checkpoints, ranks, 2)
    found = again(config, told).find()
    assert found is not None
    shards = [p for p in place(checkpoints.folder, 2).iterdir() if p.name.startswith("rank-")]
    monkeypatch.setattr(shard_reader, "_verified", {})  # as a rank's process begins
    rank = pickle.loads(pickle.dumps(found))
    monkeypatch.setattr(shard_reader.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    assert {rank.local(p.name) for p in shards} == set(shards)
    monkeypatch.undo()
    monkeypatch.setattr(shard_reader, "_verified", {})
    spoil(checkpoints.folder / "step-00000002", "flip")
    with pytest.raises(CorruptCheckpoint):
        [replace(rank, url="").local(p.name) for p in shards]
