"""`status`, `logs`, `report`, `pull` and `dashboard` from the desk: the machine is gone, the bucket is a
folder."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from pathlib import Path

import pytest
from desk import elsewhere as elsewhere
from desk import run, stand_in

from recipes.drivers import bucket_access, trained_model
from recipes.platforms.targets import target_named
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from tests.observe.written_run import write_run
from trainer import config as c
from trainer.checkpoint.attempt import Attempts
from trainer.node.launch import ray_node
from trainer.observe.node_monitor import append_sample
from trainer.observe.stream import Stream
from trainer.storage.storage import Storage
from trainer.system import processes


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A bucket with the run `far`, of 6 steps, whose machine is gone."""
    monkeypatch.setattr(bucket_access, "find_python", lambda: sys.executable)
    monkeypatch.setenv("COLUMNS", "100")
    url, machine = f"file://{tmp_path}/bucket", tmp_path / "machine"
    machine.mkdir()
    attempts = Attempts(Storage(f"{url}/far/attempts"))
    attempt = attempts.take(0, "launch")
    stream = Stream(machine, Storage(f"{url}/far"), attempt.name, 3600.0, lambda: False)
    write_run(machine, 6)
    (machine / "launch.log").write_text("the job's own words\n")
    gpu = {"gpu": 0, "busy_fraction": 0.93, "memory_bytes": 70 << 30, "power_w": 600, "temperature_c": 71}
    append_sample(
        machine,
        {
            "node": 0,
            "unix_s": time.time(),
            "gpus": [gpu] * 8,
            "ranks": {},
            "cpu_fraction": 0.2,
            "memory_fraction": 0.4,
            "disk_free_bytes": 900 << 30,
        },
    )
    stream.close()
    attempts.close(attempt, 0, "", 6)
    return url


def record(url, **values):
    (run_record.RUNS / "far/task").mkdir(parents=True)
    (run_record.RUNS / "far/task/demo.sbatch").touch()
    return RunRecord(
        run_id="far", recipe="demo", target="slurm", bucket=url, started_s=time.time() - 60, **values
    )


def test_a_run_of_another_desk_is_seen_in_its_bucket_alone(bucket, capfd):
    code, out, err = run(capfd, "status", "far", "--bucket", bucket)
    assert code == 0, err
    for seen in ("far", "step 6", "finished", "held-out accuracy", "8 GPUs 93% busy", "70 GiB, 71 °C"):
        assert seen in out
    code, out, _ = run(capfd, "logs", "far", "--bucket", bucket)
    assert code == 0 and "the job's own words" in out
    code, out, _ = run(capfd, "status", "far", "--watch", "--bucket", bucket)
    assert code == 0 and "step 6" in out
    code, out, _ = run(capfd, "pull", "far", "--bucket", bucket)
    folder = Path(out.strip().splitlines()[-1])
    assert code == 0 and len((folder / "metrics.jsonl").read_text().splitlines()) == 7
    code, out, _ = run(capfd, "report", "far", "--bucket", bucket)
    assert code == 0 and "reward" in Path(out.strip().splitlines()[-1]).read_text()


def test_a_run_of_another_desk_is_served_and_scored_from_its_bucket(bucket, tmp_path):
    config = c.RunConfig(
        run=c.Run(name="theirs"), model=c.Model(path="Qwen/Qwen3-VL-8B-Instruct", max_pixels=99_999)
    )
    stream = Stream(tmp_path / "machine", Storage(f"{bucket}/far"), "9-again", 3600.0, lambda: False)
    (tmp_path / "machine/config.yaml").write_text(c.dump(config))
    stream.close()
    own = trained_model.what_to_serve("far", bucket, None)
    assert {f"storage.weights={bucket}/far/checkpoints/hf", "model.max_pixels=99999", "run.name=far"} <= set(
        own
    )
    recipe, own = trained_model.what_to_evaluate("far", bucket, None)
    assert recipe == "grpo-qwen3-vl-8b-mathv60k" and "model.max_pixels=99999" in own


def test_a_profile_is_asked_for_on_this_machine_or_through_the_bucket(bucket, capfd):
    code, _, err = run(capfd, "profile", "far", "--bucket", bucket)
    assert code == 2 and "the run is over" in err
    code, _, err = run(capfd, "profile", "far", "--fetch", "--bucket", bucket)
    assert code == 2 and "has profiled no step yet" in err
    folder = run_record.RUNS / "near"
    folder.mkdir(parents=True)
    gone = {"status": "running", **processes.own_stamp(), "pid_started": -1}
    for progress, left in (({"status": "running"}, 0), ({"status": "finished"}, 2), (gone, 2), ({}, 2)):
        (folder / "progress.json").write_text(json.dumps(progress))
        code, out, err = run(capfd, "profile", "near")
        assert code == left and (folder / "profile.request").exists() is (not left), err
        (folder / "profile.request").unlink(missing_ok=True)


def test_a_run_launched_from_here_knows_its_bucket(bucket, capfd, monkeypatch, tmp_path):
    record(bucket, ended_s=time.time()).save()
    stand_in(tmp_path, monkeypatch, "squeue", "exit 0")
    code, out, _ = run(capfd, "logs", "far")
    assert code == 0 and "the job's own words" in out
    code, out, err = run(capfd, "status", "far")
    assert "step 6" in out, err
    assert "6, reward" in run(capfd, "status")[1], "what was fetched is in the table"
    code, out, _ = run(capfd, "report", "far")
    assert code == 0 and json.loads((run_record.RUNS / "far/pulled/cost.json").read_text())["usd"] == 0


def test_logs_fall_back_on_the_bucket_where_the_platform_has_none(bucket, capfd, monkeypatch, tmp_path):
    record(bucket).save()
    stand_in(tmp_path, monkeypatch, "sbatch", "exit 0")
    stand_in(tmp_path, monkeypatch, "tail", "exit 1")
    code, out, err = run(capfd, "logs", "far")
    assert code == 0 and "the job's own words" in out and "the platform has no log of far any more" in err


def test_the_runs_of_a_bucket_are_listed_whoever_launched_them(bucket, capfd):
    def attempt(run, **end):
        attempts = Attempts(Storage(f"{bucket}/{run}/attempts"))
        taken = attempts.take(0, "launch")
        if end:
            attempts.close(taken, **end)
        return taken

    Storage(bucket).put_bytes("data/shapes/manifest.json", b"{}")
    attempt("alive")
    attempt("broken", code=2, why="data.path is empty", committed=0)
    code, out, err = run(capfd, "runs", "--bucket", bucket)
    assert code == 0, err
    told = dict(zip(*[iter(out.splitlines()[1:])] * 2, strict=True))
    names = {line.split()[0]: below for line, below in told.items()}
    assert set(names) == {"far", "alive", "broken"}
    assert "finished" in names["far"] and "running, attempt" in names["alive"]
    assert "data.path is empty" in names["broken"]
    code, _, err = run(capfd, "runs", "--bucket", f"{bucket}/nothing")
    assert code == 2 and "no run in" in err
    code, _, err = run(capfd, "runs")
    assert code == 2 and "give --bucket" in err
    record(bucket).save()
    assert "far" in run(capfd, "runs")[1]


def test_a_run_that_was_fetched_is_known_and_a_wrong_bucket_is_no_older_file(bucket, capfd):
    code, _, err = run(capfd, "status", "far")
    assert code == 2 and "no run far was launched from here" in err
    assert run(capfd, "pull", "far", "--bucket", bucket)[0] == 0
    code, out, err = run(capfd, "status", "far")
    assert code == 0 and "step 6" in out, err
    assert "the job's own words" in run(capfd, "logs", "far")[1]
    assert f"far: fetched from {bucket}, not launched from here" in run(capfd, "status")[1]
    for command in ("status", "report", "pull"):
        code, out, err = run(capfd, command, "far", "--bucket", f"{bucket}-of-another")
        assert code == 2 and "step 6" not in out and "no stream of a run in" in err, command
    assert run(capfd, "status", "far")[0] == 0, "the bucket that it was found in is kept"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pull", "nothing"], "give --bucket"),
        (["logs", "nothing"], "give --bucket"),
        (["status", "--watch"], "no run was launched from here"),
        (["report", "nothing"], "no run at nothing"),
        (["dashboard", "nothing"], "no run nothing was launched from here"),
    ],
)
def test_what_cannot_be_seen_is_one_line(arguments, message, capfd):
    code, _, err = run(capfd, *arguments)
    assert code == 2 and err.startswith("launch.py: ") and err.count("\n") == 1 and message in err


def test_a_bucket_without_the_run_is_one_line(bucket, capfd):
    code, _, err = run(capfd, "pull", "other", "--bucket", bucket)
    assert code == 2 and "no stream of a run in" in err and err.count("\n") == 1


def test_status_of_a_run_that_has_not_begun_is_no_failure(bucket, capfd, monkeypatch, tmp_path):
    (run_record.RUNS / "new/task").mkdir(parents=True)
    (run_record.RUNS / "new/task/demo.sbatch").touch()
    RunRecord(run_id="new", recipe="demo", target="slurm", bucket=bucket, started_s=time.time()).save()
    stand_in(tmp_path, monkeypatch, "squeue", "exit 0")
    code, _, err = run(capfd, "status", "new")
    assert code == 0 and "no stream of a run in" in err


def test_the_dashboard_is_found_through_ssh_and_its_token_kept_private(capfd, monkeypatch, tmp_path):
    RunRecord(
        run_id="far",
        recipe="preflight",
        target="ssh",
        overrides=["site.hosts=[me@gpu1:2222]", "cluster.nodes=1"],
    ).save()
    token = tmp_path / "token"
    token.write_text("a-secret")
    line = ray_node.publish_dashboard("far", "http://10.0.0.4:8265", str(token))
    assert "dashboard http://10.0.0.4:8265" in line and "a-secret" not in line
    stand_in(tmp_path, monkeypatch, "ssh", 'case "$*" in *cat*) cat "$HOME/.cache/spotrl/far.json" ;; esac')
    code, out, _ = run(capfd, "dashboard", "far")
    asked, tunnel = (tmp_path / "calls").read_text().splitlines()
    assert code == 0 and "a-secret" not in out + asked + tunnel
    assert asked.endswith("me@gpu1 cat .cache/spotrl/far.json") and "-p 2222" in tunnel
    assert ":10.0.0.4:8265" in tunnel and tunnel.startswith("ssh -N") and tunnel.endswith("me@gpu1")
    kept = run_record.RUNS / "far/ray.token"
    assert kept.read_text() == "a-secret" and stat.S_IMODE(os.stat(kept).st_mode) == 0o600
    assert f"RAY_AUTH_TOKEN_PATH={kept.absolute()}" in out and "ray job list" in out
    assert stat.S_IMODE(os.stat(tmp_path / ".cache/spotrl/far.json").st_mode) == 0o600
    ray_node.withdraw_dashboard("far")
    stand_in(tmp_path, monkeypatch, "ssh", "echo 'cat: no such file' >&2; exit 1")
    code, _, err = run(capfd, "dashboard", "far")
    assert code == 2 and "is it running?" in err


@pytest.mark.parametrize(
    ("target", "managed", "login"),
    [
        ("skypilot-runpod", False, "far"),
        ("dstack-runpod", False, "far"),
        ("slurm", False, None),
        ("local", False, None),
    ],
)
def test_how_each_target_is_reached(target, managed, login):
    record = RunRecord(run_id="far", recipe="demo", target=target, managed=managed)
    read = target_named(target).read_from_head(record, "file", dry_run=True)
    assert read[0] == "cat" if login is None else read[0] == "ssh" and read[-2:] == [login, "cat file"]


def test_logs_of_an_id_that_nobody_knows_name_it_and_those_that_are_known(capsys, elsewhere):
    RunRecord(run_id="mine", recipe="demo", target="local").save()
    for command in ("logs", "pull"):
        code, _, err = run(capsys, command, "nosuch")
        assert code == 2 and "no run nosuch was launched from here (known: mine)" in err
    code, _, err = run(capsys, "pull", "mine")
    assert code == 2 and "mine has no bucket that this machine knows of: give --bucket" in err
