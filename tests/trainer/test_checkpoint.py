"""Checkpoints on real disks and stores: format, commit point, fall-back, refusal, retention, budget, elastic reads."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import servers
from tests.trainer.synthetic import SHAPES, configure, cut, holds, save, whole, writers
from trainer.checkpoint import CheckpointError, Checkpoints, CorruptCheckpoint, Shard, ShardReader, export_hf
from trainer.checkpoint_write import decode, encode, step_name
from trainer.config import ConfigError, override
from trainer.storage import Storage, StorageError
from trainer.stores import Retry

QUICK = Retry(attempts=2, first_wait_s=0.1, max_wait_s=0.2, request_retries=0, request_retry_s=1.0)


@pytest.fixture
def told():
    return []


@pytest.fixture
def run(tmp_path, told):
    """(config, checkpoints, writers of 2 ranks) of a run with a local and a file:// remote store."""
    config = configure(tmp_path, "placement.workers_per_node=2")
    checkpoints = Checkpoints(config, "data", say=told.append)
    yield config, checkpoints, writers(config, 2)
    checkpoints.close()


def again(config, told, data="data"):
    return Checkpoints(config, data, say=told.append)


# --- format -----------------------------------------------------------------------------------------------------------


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
    back = decode(json.loads(json.dumps(encode(state))))
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
        encode({"x": object()})


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
    remote = tmp_path / "remote/test/checkpoints/step-00000002"
    assert {p.name for p in folder.iterdir()} == {p.name for p in remote.iterdir() if p.suffix != ".sha256"}


def test_large_shards_are_cut_into_files(run, tmp_path, monkeypatch):
    config, checkpoints, ranks = run
    monkeypatch.setattr("trainer.checkpoint_write.FILE_BYTES", 2000)
    save(checkpoints, ranks, 2)
    found = checkpoints.find()
    assert found
    assert any(entry["name"] == "rank-00001-of-00002.2.safetensors" for entry in found.manifest["files"])
    assert holds(found, 2)
    shutil.rmtree(tmp_path / "run")
    ShardReader(found).read("master", "model.embed.weight")
    time.sleep(0.2)
    fetched = {p.name for p in (tmp_path / "run").rglob("*.safetensors")}
    assert 0 < len(fetched) < len([e for e in found.manifest["files"] if e["name"].endswith(".safetensors")]), (
        "only the files that hold weights are fetched"
    )


# --- elastic ----------------------------------------------------------------------------------------------------------


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


def test_a_rank_fetches_only_the_files_it_reads(tmp_path, told):
    config = configure(tmp_path)
    save(again(config, told), writers(config, 4), 2)
    shutil.rmtree(tmp_path / "run")
    found = again(config, told).find()
    assert found
    full = whole(2)["model.embed.weight"]["master"]
    reader = ShardReader(found)
    assert torch.equal(reader.read("master", "model.embed.weight", 0, 100), full[:100])
    assert [p.name for p in sorted((tmp_path / "run").rglob("*.safetensors"))] == ["rank-00000-of-00004.safetensors"]


def test_unknown_and_missing_pieces_are_named(run):
    config, checkpoints, ranks = run
    save(checkpoints, ranks, 2)
    reader = ShardReader(checkpoints.find())
    with pytest.raises(CheckpointError, match="no parameter other"):
        reader.read("master", "other")


# --- commit, verification, fall-back ----------------------------------------------------------------------------------


def test_nothing_counts_before_the_manifest(run, tmp_path, told):
    config, checkpoints, ranks = run
    save(checkpoints, ranks, 2)
    checkpoints.begin(4, {})
    for writer in ranks:
        writer.start(4, cut(whole(4), writer.rank, 2), {})
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
    for place in places.get(where) or [tmp_path / "run", tmp_path / "remote/test"]:
        spoil(place / "checkpoints/step-00000004", damage)
    if where == "remote":
        shutil.rmtree(tmp_path / "run")
    found, _ = again(config, told).restore(lambda found: holds(found, found.step) or pytest.fail("wrong values"))
    assert found.step == (4 if where == "local" else 2)
    if where != "local" and damage != "manifest":
        assert any("falling back" in text and "step 4" in text for text in told)


def test_when_none_is_whole_it_stops_rather_than_start_afresh(run, tmp_path, told):
    config, checkpoints, ranks = run
    save(checkpoints, ranks, 2)
    for place in (tmp_path / "run", tmp_path / "remote/test"):
        spoil(place / "checkpoints/step-00000002", "cut")
    with pytest.raises(ConfigError, match="steps 2 .* none is whole"):
        again(config, told).restore(lambda found: holds(found, 2))


def spoil(folder, damage):
    path = folder / ("manifest.json" if damage == "manifest" else "rank-00001-of-00002.safetensors")
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[-5] ^= 1
        path.write_bytes(data)


def test_after_a_fall_back_the_damaged_checkpoint_is_replaced(run, tmp_path, told):
    config, checkpoints, ranks = run
    for step in (2, 4):
        save(checkpoints, ranks, step)
    for place in (tmp_path / "run", tmp_path / "remote/test"):
        spoil(place / "checkpoints/step-00000004", "flip")
    second = again(config, told)
    assert second.restore(second.fetch)[0].step == 2
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
        writer.start(2, cut(whole(2), writer.rank, 2), {})
    checkpoints.finish(lambda: [writer.status() for writer in ranks])
    shutil.rmtree(tmp_path / "run")
    found = again(config, told).find()
    assert found.local("metrics.jsonl").read_text() == '{"step": 1}\n'
    assert holds(found, 2)


def test_a_commit_that_was_local_only_is_sent_on_resume(run, tmp_path, told):
    config, checkpoints, ranks = run
    save(checkpoints, ranks, 2)
    save(checkpoints, ranks, 4)
    (tmp_path / "remote/test/checkpoints/step-00000004/manifest.json").unlink()
    (tmp_path / "remote/test/checkpoints/step-00000004/rank-00001-of-00002.safetensors").unlink()
    second = again(config, told)
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
    with pytest.raises(ConfigError, match="not what the checkpoint was trained on"):
        again(config, told, data="other").find()
    elsewhere = override(config, ["placement.nodes=3", "algorithm.micro_batch=2", "checkpoint.keep_last=5"])
    assert again(elsewhere, told).find().step == 2, "where and how fast may differ"


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


# --- retention and budget ---------------------------------------------------------------------------------------------


def steps_in(folder):
    return sorted(int(p.name[5:]) for p in folder.glob("step-*") if (p / "manifest.json").exists())


def test_keeps_the_last_and_the_best_local_and_remote_apart(tmp_path, told):
    config = configure(tmp_path, "checkpoint.keep_last=1", "checkpoint.keep_last_remote=3", "checkpoint.keep_best=1")
    checkpoints, ranks = again(config, told), writers(config, 1)
    for step, score in ((2, 0.1), (4, 0.9), (6, 0.3), (8, None), (10, 0.2)):
        save(checkpoints, ranks, step, score=score)
    assert steps_in(tmp_path / "run/checkpoints") == [4, 10]
    assert steps_in(tmp_path / "remote/test/checkpoints") == [4, 6, 8, 10]
    left = [p.name for p in (tmp_path / "remote/test/checkpoints").iterdir()]
    assert sorted(left) == [step_name(step) for step in (4, 6, 8, 10)], "nothing of the others is left"


def test_old_ones_stay_until_the_store_has_the_new_one(tmp_path, told):
    config = configure(tmp_path, "checkpoint.keep_last=1", "checkpoint.keep_last_remote=1")
    config = override(config, ["checkpoint.remote=s3://bucket/x"])
    with servers.rclone(tmp_path / "disk") as server:
        store = Storage("s3://bucket/x/test/checkpoints", env=server.env, retry=QUICK)
        checkpoints = Checkpoints(config, "data", storage=store, say=told.append)
        ranks = writers(config, 1, storage=store)
        save(checkpoints, ranks, 2)
        server.kill()
        save(checkpoints, ranks, 4)
        assert steps_in(tmp_path / "run/checkpoints") == [2, 4]
        assert checkpoints.failures == 1
        assert any("committed locally only" in text for text in told)
        assert checkpoints.due(5, 1.0), "tried again at once"
        server.start()
        save(checkpoints, ranks, 5)
        assert steps_in(tmp_path / "run/checkpoints") == [5]
        assert {key.split("/")[0] for key, _ in store.list()} == {"step-00000005"}
        assert checkpoints.failures_in_a_row == 0


def test_three_failures_in_a_row_stop_the_run(tmp_path, told):
    config = override(configure(tmp_path), ["checkpoint.remote=s3://bucket/x"])
    gone = Storage("s3://bucket/x", env=servers.s3_environment(servers.free_port()), retry=QUICK)
    checkpoints = Checkpoints(config, "data", storage=gone, say=told.append)
    ranks = writers(config, 1, storage=gone)
    save(checkpoints, ranks, 2)
    save(checkpoints, ranks, 3)
    with pytest.raises(StorageError, match="3 checkpoints in a row"):
        save(checkpoints, ranks, 4)
    found = Checkpoints(config, "data", storage=gone, say=told.append).find()
    assert found and found.step == 4, "the local ones are whole"
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StorageError):
        Checkpoints(config, "data", storage=gone, say=told.append).find()


def test_disk_budget_drops_old_ones_early_then_refuses_before_writing(tmp_path, told):
    size = sum(3 * 4 * torch.Size(shape).numel() for shape in SHAPES.values())
    config = configure(tmp_path, "checkpoint.keep_last=3", f"checkpoint.max_disk_gib={3.6 * size / 2**30}")
    checkpoints, ranks = again(config, told), writers(config, 1)
    for step in (2, 4, 6):
        save(checkpoints, ranks, step)
    assert any("dropping the local checkpoint of step 2 early" in text for text in told)
    assert steps_in(tmp_path / "run/checkpoints") == [4, 6]
    tight = override(config, [f"checkpoint.max_disk_gib={1.5 * size / 2**30}"])
    checkpoints, ranks = again(tight, told), writers(tight, 1)
    checkpoints.find()
    with pytest.raises(CheckpointError, match=r"no room .* raise checkpoint\.max_disk_gib"):
        save(checkpoints, ranks, 8)
    assert not list((tmp_path / "run/checkpoints").glob("step-00000008/rank*"))
    assert steps_in(tmp_path / "run/checkpoints") == [6], "the newest one stays"


def test_full_disk_is_reported_and_nothing_half_written_is_left(tmp_path, told, monkeypatch):
    """A file size limit of the process stands for the full disk: write() fails half way, for real."""
    code = f"""
import resource, signal, sys
sys.path[:0] = [{os.getcwd()!r}]
from tests.trainer.synthetic import *
from trainer.checkpoint import CheckpointError
config = configure({str(tmp_path)!r})
checkpoints, ranks = Checkpoints(config, "data"), writers(config, 1)
save(checkpoints, ranks, 2)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
try:
    save(checkpoints, ranks, 4)
except CheckpointError as error:
    print(error)
    checkpoints.failed(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert not list((checkpoints.folder / "step-00000004").iterdir())
assert checkpoints.due(5, 1.0)
save(checkpoints, ranks, 5)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    assert "rank 0 could not write its checkpoint" in result.stdout
    found = again(configure(tmp_path), told).find()
    assert found.step == 5
    assert holds(found, 5)


# --- asynchronous -----------------------------------------------------------------------------------------------------


def test_training_goes_on_while_it_is_written(tmp_path, told):
    """The values of the step are saved, though `host` copies are followed by in-place updates at once."""
    config = override(configure(tmp_path), ["checkpoint.remote=s3://bucket/x"])
    with servers.rclone(tmp_path / "disk") as server, servers.proxy(server.port) as relay:
        relay.bytes_per_s = 20e3
        env = servers.s3_environment(relay.port)
        store = Storage("s3://bucket/x/test/checkpoints", env=env)
        checkpoints = Checkpoints(config, "data", storage=store, say=told.append)
        (writer,) = writers(config, 1, storage=store)
        device = whole(2)
        begun = time.monotonic()
        checkpoints.begin(2, {})
        shards = {
            name: Shard(shape, 0, t["master"].numel(), {kind: writer.host(f"{kind}/{name}", t[kind]) for kind in t})
            for name, shape in SHAPES.items()
            for t in [device[name]]
        }
        writer.start(2, shards, {})
        for tensors in device.values():
            for tensor in tensors.values():
                tensor.zero_()
        stall = time.monotonic() - begun
        assert writer.status() is None
        assert not checkpoints.advance([writer.status()])
        assert not checkpoints.due(4, 1.0), "one at a time"
        checkpoints.finish(lambda: [writer.status()])
        assert stall < 0.2 < checkpoints.save_s
        assert checkpoints.due(4, 1.0)
        assert holds(checkpoints.find(), 2)


def test_the_writer_keeps_its_host_buffers(run):
    _, _, (writer, _) = run
    first = writer.host("a", torch.ones(4, 2))
    second = writer.host("a", torch.zeros(4, 2))
    assert first.data_ptr() == second.data_ptr()
    assert first.shape == (8,)
    assert torch.equal(second, torch.zeros(8))


def test_shards_that_do_not_fit_their_place_are_refused(run):
    _, checkpoints, (writer, _) = run
    writer.start(2, {"a": Shard((4,), 0, 2, {"master": torch.zeros(3)})}, {})
    with pytest.raises(CheckpointError, match="master/a: 3 elements"):
        writer.wait()


# --- when -------------------------------------------------------------------------------------------------------------


def test_due_every_n_steps_and_at_the_end(tmp_path, told):
    config = configure(tmp_path, "checkpoint.every_steps=3")
    checkpoints, ranks = again(config, told), writers(config, 1)
    saved = []
    for step in range(1, 9):
        if checkpoints.due(step, 1.0, last=step == 8):
            save(checkpoints, ranks, step)
            saved.append(step)
    assert saved == [3, 6, 8]
    resumed = again(config, told)
    assert resumed.find().step == 8
    assert [step for step in (9, 10) if resumed.due(step, 1.0)] == [9]


def test_interval_by_daly_is_measured_and_told(tmp_path, told):
    config = configure(tmp_path, "checkpoint.every_steps=0", "checkpoint.mean_time_between_preemptions_s=3600")
    checkpoints, ranks = again(config, told), writers(config, 1)
    assert checkpoints.due(1, 10.0), "the first step is saved, to measure"
    save(checkpoints, ranks, 1)
    checkpoints.stall_s = 5.0
    due = [step for step in range(2, 40) if checkpoints.due(step, 10.0)]
    assert due[0] == 19, "sqrt(2 * 5 * 3600) = 190 s, less the stall: 18 or 19 steps of 10 s"
    assert any("saving every" in text and "one preemption in 3600 s" in text for text in told)
    assert checkpoints.metrics()["perf/checkpoint_interval_steps"] == checkpoints.interval_steps


def test_a_save_fits_the_notice_only_when_it_was_measured_to(run):
    _, checkpoints, ranks = run
    assert not checkpoints.fits(1e9)
    save(checkpoints, ranks, 2)
    assert checkpoints.fits(30.0)
    checkpoints.save_s = 40.0
    assert not checkpoints.fits(30.0)


# --- killed -----------------------------------------------------------------------------------------------------------

KILLED = """
import sys
sys.path[:0] = [{root!r}]
from tests.trainer.synthetic import *
config = override(configure({folder!r}), ["checkpoint.remote=s3://bucket/x"])
checkpoints = Checkpoints(config, "data")
found = checkpoints.find()
step = found.step if found else 0
assert found is None or holds(found, step), "wrong values after a kill"
print("resumed", step, flush=True)
ranks = writers(config, 2)
while step < 60:
    step += 2
    save(checkpoints, ranks, step)
    print("saved", step, flush=True)
"""


@pytest.mark.slow
def test_sigkill_at_any_moment_never_loses_a_committed_checkpoint(tmp_path, told):
    """Kills the writer at random moments; what a fresh process finds is whole and never older than what was told."""
    chance, told_step, resumed = random.Random(0), 0, []
    with servers.rclone(tmp_path / "disk") as server:
        for _ in range(12):
            process = subprocess.Popen(
                [sys.executable, "-c", KILLED.format(root=os.getcwd(), folder=str(tmp_path))],
                env=os.environ | server.env, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            lines: list[str] = []
            reader = threading.Thread(target=lambda p=process, out=lines: out.extend(p.stdout))
            reader.start()
            while not lines and process.poll() is None:
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.6))
            process.send_signal(signal.SIGKILL)
            process.wait()
            reader.join()
            assert lines and lines[0].startswith("resumed"), "it failed before it was killed"
            resumed.append(int(lines[0].split()[1]))
            assert resumed[-1] >= told_step
            told_step = max([told_step, *(int(line.split()[1]) for line in lines)])
            if chance.random() < 0.5:
                shutil.rmtree(tmp_path / "run", ignore_errors=True)  # the replacement is a fresh node
    assert told_step > 10
    assert len(set(resumed)) > 4


# --- export -----------------------------------------------------------------------------------------------------------


def test_export_writes_what_from_pretrained_reads(tmp_path, told):
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    small = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(small)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base/tokenizer_note.txt").write_text("kept")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    config = configure(tmp_path)
    checkpoints, (writer,) = again(config, told), writers(config, 1)
    checkpoints.begin(2, {})
    shards = {
        name: Shard(tuple(p.shape), 0, p.numel(), {"master": p.detach().reshape(-1).clone()})
        for name, p in model.named_parameters()
    }
    writer.start(2, shards, {})
    checkpoints.finish(lambda: [writer.status()])
    out = export_hf(checkpoints.find(), tmp_path / "hf", tmp_path / "base", "fp32", file_bytes=20_000)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert (out / "tokenizer_note.txt").exists()
    back = AutoModelForCausalLM.from_pretrained(out)
    for (name, mine), (_, theirs) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    half = export_hf(checkpoints.find(), tmp_path / "hf", tmp_path / "base", "bf16")
    assert load_file(half / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert not list(half.glob("model-*")), "the former export is gone"
    with pytest.raises(ConfigError, match=r"config\.json"):
        export_hf(checkpoints.find(), tmp_path / "hf2", tmp_path)


def test_export_takes_frozen_weights_from_the_base_model(tmp_path, told):
    from safetensors.torch import save_file

    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    tensors = {
        "visual.patch": torch.randn(3, 4),
        "model.layers.0.w": torch.randn(2, 2),
        "lm_head.weight": torch.ones(2),
    }
    save_file(tensors, base / "model.safetensors")
    config = configure(tmp_path)
    checkpoints, (writer,) = again(config, told), writers(config, 1)
    checkpoints.begin(2, {})
    name = "model.language_model.layers.0.w"
    writer.start(2, {name: Shard((2, 2), 0, 4, {"master": torch.arange(4.0)})}, {})
    checkpoints.finish(lambda: [writer.status()])
    weights = load_file(export_hf(checkpoints.find(), tmp_path / "hf", base, "fp32") / "model.safetensors")
    assert torch.equal(weights.pop(name), torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    assert weights.keys() == {"visual.patch", "lm_head.weight"}
    assert torch.equal(weights["visual.patch"], tensors["visual.patch"])


EXPORT = """
import resource, sys
sys.path[:0] = [{root!r}]
from trainer.checkpoint import export_hf
def anonymous():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon"))) // 1024
import threading, time
seen, stop = [], False
def watch():
    while not stop:
        seen.append(anonymous()); time.sleep(0.005)
before = anonymous()
thread = threading.Thread(target=watch); thread.start()
export_hf({source!r}, {out!r}, {model!r})
stop = True; thread.join()
print(max(seen) - before)
"""


def test_export_streams(tmp_path, told):
    """Exports 512 MiB of fp32 masters; what the process allocates stays below 250 MiB (mapped shard pages aside)."""
    shapes = {f"layer.{i}.weight": (8192, 8192) for i in range(2)}
    config = configure(tmp_path, "checkpoint.remote=")
    checkpoints, (writer,) = again(config, told), writers(config, 1)
    checkpoints.begin(2, {})
    value = torch.ones(8192 * 8192)
    writer.start(2, {name: Shard(shape, 0, value.numel(), {"master": value}) for name, shape in shapes.items()}, {})
    checkpoints.finish(lambda: [writer.status()])
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    source = str(tmp_path / "run/checkpoints/step-00000002")
    code = EXPORT.format(root=os.getcwd(), source=source, out=str(tmp_path / "hf"), model=str(tmp_path / "base"))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert int(result.stdout) < 250
    assert (tmp_path / "hf/model.safetensors").stat().st_size > 2 * 2 * 8192 * 8192


def test_a_damaged_shard_stops_an_export_and_leaves_nothing(run, tmp_path):
    config, checkpoints, ranks = run
    save(checkpoints, ranks, 2)
    found = checkpoints.find()
    for place in (tmp_path / "run", tmp_path / "remote/test"):
        spoil(place / "checkpoints/step-00000002", "flip")
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint, match="rank-00001"):
        export_hf(found, tmp_path / "hf", tmp_path / "base")
    assert not (tmp_path / "hf").exists()
