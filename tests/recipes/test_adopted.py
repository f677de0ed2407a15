"""Two desks and one bucket: what the first launched, the second drives from the bucket's manifest alone."""

import json
import socket
import sys

import pytest
from desk import elsewhere as elsewhere
from desk import run, stand_in

from recipes.drivers import desk_python, status
from recipes.records import manifest, run_record
from recipes.records.run_record import RunRecord
from tests import servers
from trainer.checkpoint.attempt import Attempts
from trainer.config.run_store import RunStore
from trainer.storage.storage import Storage

SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"
MINE = """\
from dataclasses import replace
from recipes.presets import get

def recipe():
    return replace(get("grpo-qwen2.5-vl-7b-mathv60k"), name="mine")
"""


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """The bucket's address; both desks look into it with this Python."""
    monkeypatch.setattr(desk_python, "find_python", lambda: sys.executable)
    stand_in(tmp_path, monkeypatch, "sbatch", 'echo "77"')
    stand_in(tmp_path, monkeypatch, "scancel", "")
    stand_in(tmp_path, monkeypatch, "tail", "")
    return f"file://{tmp_path}/bucket"


def at_another_desk(tmp_path, monkeypatch):
    """From now on the records are those of a desk that has launched nothing."""
    for module in (run_record, manifest, status):
        monkeypatch.setattr(module, "RUNS", tmp_path / "elsewhere/runs")


def launched(capfd, bucket, recipe=SEVEN, *more):
    up = ["up", recipe, "--target", "slurm", "--detach", "--run-id", "far", "--bucket", bucket, *more]
    code, _, err = run(capfd, *up)
    assert code == 0, err
    return run_record.load_record("far")


def test_another_desk_ends_and_resumes_a_run(bucket, capfd, tmp_path, monkeypatch):
    first = launched(capfd, bucket, SEVEN, "--set", "optimizer.learning_rate=2e-6", "--", "--exclude=gpu-7")
    at_another_desk(tmp_path, monkeypatch)
    code, _, err = run(capfd, "down", "far", "--bucket", bucket)
    assert code == 0, err
    assert "scancel 77" in (tmp_path / "calls").read_text()
    adopted = run_record.load_record("far")
    assert (adopted.cluster, adopted.recipe, adopted.flags) == ("77", SEVEN, ["--exclude=gpu-7"])
    assert adopted.overrides == first.overrides and adopted.desk == socket.gethostname()
    code, _, err = run(capfd, "resume", "far")
    assert code == 0, err
    calls = (tmp_path / "calls").read_text().splitlines()
    last = [line for line in calls if line.startswith("sbatch")][-1]
    assert len(calls) >= 4 and "--exclude=gpu-7" in last
    task = (run_record.RUNS / "far/task").glob("*.sbatch")
    assert "learning_rate: 2.0e-06" in next(task).read_text()


def test_the_bucket_holds_the_platforms_name_of_the_run_and_no_token(bucket, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_a-token-that-must-stay-here")
    launched(capfd, bucket)
    text = (tmp_path / "bucket/far/manifest.json").read_text()
    assert not json.loads(text)["launch"]["diff"], "a file that git does not know may hold a token"
    assert json.loads(text)["launch"]["record"]["cluster"] == "77" and "hf_a-token" not in text


def test_a_recipe_of_a_file_comes_with_the_run(bucket, capfd, tmp_path, monkeypatch):
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    launched(capfd, bucket, f"{mine}:recipe")
    mine.unlink()
    at_another_desk(tmp_path, monkeypatch)
    code, out, err = run(capfd, "resume", "far", "--bucket", bucket, "--dry-run")
    assert code == 0 and "--job-name=mine" in out, err


def test_a_run_that_lives_is_not_resumed_by_another_desk(bucket, capfd, tmp_path, monkeypatch):
    launched(capfd, bucket)
    Attempts(Storage(f"{bucket}/far/attempts")).take(0, "first").beat()
    at_another_desk(tmp_path, monkeypatch)
    code, _, err = run(capfd, "resume", "far", "--bucket", bucket)
    assert code == 2 and "run far is alive (attempt" in err


def test_what_is_no_run_is_refused_and_leaves_nothing(bucket, capfd, tmp_path, monkeypatch):
    for command in (["resume", "far"], ["down", "far"], ["dashboard", "far"]):
        code, _, err = run(capfd, *command)
        assert code == 2 and "no run far was launched from here" in err
        code, _, err = run(capfd, *command, "--bucket", bucket)
        assert code == 2 and f"no launch of far in {bucket}" in err and not run_record.is_known("far")
    code, out, _ = run(capfd, "status")
    assert code == 0 and "no run was launched from here" in out


def test_a_run_of_this_machine_is_driven_on_that_machine(capfd):
    RunRecord(run_id="near", recipe="demo", target="local", desk="another-machine").save()
    code, _, err = run(capfd, "down", "near")
    assert code == 2 and "runs on another-machine itself" in err


def test_another_desk_serves_and_scores_a_run_that_began_with_a_folder(bucket, capfd, tmp_path, monkeypatch):
    """The folder is the first desk's; the second plans by the config.json that the run exported."""
    shape = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    shape |= {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936}
    mine = tmp_path / "my-model"
    mine.mkdir()
    (mine / "config.json").write_text(json.dumps(shape))
    with servers.rclone(tmp_path / "disk") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        _served_elsewhere("s3://bucket", mine, shape, capfd, tmp_path, monkeypatch)


def _served_elsewhere(bucket, mine, shape, capfd, tmp_path, monkeypatch):
    launched(capfd, bucket, "grpo-qwen2.5-0.5b-gsm8k", "--set", f"model.path={mine}")
    (mine / "config.json").unlink()
    exported = Storage(RunStore(f"{bucket}/far").exported)
    at_another_desk(tmp_path, monkeypatch)
    serve = ["serve", "far", "--bucket", bucket, "--target", "skypilot-runpod", "--dry-run"]
    code, _, err = run(capfd, *serve)
    assert code == 2 and f"began with {mine}, which is not here" in err and "has no config.json" in err
    exported.put_bytes("config.json", json.dumps(shape).encode())
    for command in (serve, ["evaluate", "far", "--benchmarks", "gsm8k", *serve[2:]]):
        code, out, err = run(capfd, *command)
        assert code == 0, err
        task = out[out.index("# --- ") :]
        assert f"-m trainer.checkpoint.weights {bucket}/far/checkpoints/hf" in task
        assert "would upload" not in out
