"""Two desks and one bucket: what the first launched, the second drives from the bucket's manifest alone."""

import json
import socket
import sys

import pytest
from desk import elsewhere as elsewhere
from desk import run, stand_in

from recipes.drivers import bucket_access, status
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
    monkeypatch.setattr(bucket_access, "find_python", lambda: sys.executable)
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
    assert code == 2 and "passed on to the platform: --exclude=gpu-7" in err and "give --trust" in err
    assert "scancel" not in (tmp_path / "calls").read_text() and not run_record.is_known("far")
    code, _, err = run(capfd, "down", "far", "--bucket", bucket, "--trust")
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
    resume = ["resume", "far", "--bucket", bucket, "--dry-run"]
    code, out, err = run(capfd, *resume)
    assert code == 2 and "    def recipe():" in err and not run_record.is_known("far"), err
    code, out, err = run(capfd, *resume, "--trust")
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
    serve = ["serve", "far", "--bucket", bucket, "--target", "skypilot-runpod", "--dry-run", "--trust"]
    code, _, err = run(capfd, *serve)
    assert code == 2 and f"began with {mine}, which is not here" in err and "has no config.json" in err
    exported.put_bytes("config.json", json.dumps(shape).encode())
    for command in (serve, ["evaluate", "far", "--benchmarks", "gsm8k", *serve[2:]]):
        code, out, err = run(capfd, *command)
        assert code == 0, err
        task = out[out.index("# --- ") :]
        assert f"-m trainer.checkpoint.weights {bucket}/far/checkpoints/hf" in task
        assert "would upload" not in out


def forged(tmp_path, **changed):
    """Changes the record of a launch in its bucket, as anybody may who can write there."""
    file = tmp_path / "bucket/far/manifest.json"
    data = json.loads(file.read_text())
    for key, value in changed.items():
        part = data["launch"] if key == "recipe_file" else data["launch"]["record"]
        part[key] = value
    file.write_text(json.dumps(data))


MARK = "touch MARK"
DRIVEN = (
    ["down", "far"],
    ["resume", "far", "--dry-run"],
    ["serve", "far", "--target", "slurm", "--dry-run"],
    ["dashboard", "far", "--dry-run"],
)
HOSTILE = {
    "a shell line as the id": {"run_id": f"x;{MARK}", "target": "local"},
    "an option as the job": {"cluster": "--user=root"},
    "all jobs": {"cluster": "all"},
    "a target that is none": {"target": "local;x"},
    "another run": {"run_id": "other"},
    "another server": {"flags": ["--server=https://evil.example"]},
    "options of somebody else": {"overrides": [f"site.prelude={MARK}"]},
    "a recipe of its own": {"recipe": "evil.py:recipe", "recipe_file": f"import os; os.system('{MARK}')"},
    "a recipe elsewhere": {"recipe": "../../evil.py:recipe"},
    "numbers that are none": {"started_s": 1e300},
    "more jobs than there are": {"jobs": 10**9},
    "escape sequences": {"desk": "\x1b]0;owned\x07"},
    "a list for a text": {"bucket": ["s3://other"]},
}


@pytest.mark.parametrize("command", DRIVEN, ids=lambda words: words[0])
@pytest.mark.parametrize("words", HOSTILE.values(), ids=HOSTILE)
def test_what_a_bucket_says_is_never_run(words, command, bucket, capfd, tmp_path, monkeypatch):
    launched(capfd, bucket)
    forged(tmp_path, **json.loads(json.dumps(words).replace("MARK", str(tmp_path / "ran"))))
    at_another_desk(tmp_path, monkeypatch)
    (tmp_path / "calls").unlink()
    try:
        code, out, err = run(capfd, *command, "--bucket", bucket)
    except SystemExit as refused:  # `serve` looks for the run's stream, and says that there is none
        code, (out, err) = refused.code, capfd.readouterr()
    assert not (tmp_path / "ran").exists() and "Traceback" not in out + err
    assert not (tmp_path / "calls").exists(), "no program of a platform was called"
    assert "\x1b" not in out + err
    if words == {"cluster": "all"} and command[0] != "down":  # which names no job
        return
    assert code == 2 and err.strip(), out
    assert not run_record.is_known("far") or words == {"cluster": "all"}


def test_a_manifest_of_gigabytes_is_not_read(bucket, capfd, tmp_path, monkeypatch):
    launched(capfd, bucket)
    with (tmp_path / "bucket/far/manifest.json").open("r+b") as file:
        file.truncate(1 << 32)
    at_another_desk(tmp_path, monkeypatch)
    code, _, err = run(capfd, "down", "far", "--bucket", bucket)
    assert code == 2 and "at most" in err and "Traceback" not in err
