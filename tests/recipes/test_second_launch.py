"""A second launch of a run that is alive, and flags that are passed on to the engine."""

import subprocess
from dataclasses import replace

from desk import elsewhere as elsewhere
from desk import run, stand_in

from recipes.drivers import launch_checks, launched_run
from recipes.platforms.answers import PlatformAnswer
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from tests import servers
from trainer.checkpoint.attempt import Attempts
from trainer.storage.storage import Storage

SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"


def test_a_second_launch_of_a_run_that_is_alive_is_refused_unless_it_takes_over(
    capsys, monkeypatch, tmp_path
):
    stand_in(tmp_path, monkeypatch, "sbatch", 'echo "77"')
    stand_in(tmp_path, monkeypatch, "scancel", "")
    bucket = f"file://{tmp_path}/bucket"
    up = ["up", SEVEN, "--target", "slurm", "--detach", "--run-id", "mine", "--bucket", bucket]
    assert run(capsys, *up)[0] == 0
    held = Attempts(Storage(f"{bucket}/mine/attempts")).take(0, "first")
    held.beat()
    for command in (up, ["resume", "mine"]):
        code, _, err = run(capsys, *command)
        assert code == 2 and f"run mine is alive (attempt {held.name}" in err and "--takeover" in err
        assert err.count("\n") == 1
    code, out, _ = run(capsys, *up, "--takeover")
    assert code == 0 and "replacing run mine" in out
    calls = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == ["sbatch", "scancel", "sbatch"]
    held.beat()  # as the new one would
    assert run(capsys, "down", "mine")[0] == 0
    assert run(capsys, *up)[0] == 0, (
        "what our own `down` has ended is not alive, though its last mark is fresh"
    )


def test_a_job_that_waits_for_its_machines_is_alive(capsys, monkeypatch, tmp_path):
    """Nothing is in the bucket yet: the engine knows."""
    stand_in(tmp_path, monkeypatch, "sky", "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    RunRecord(
        run_id="mine",
        recipe=SEVEN,
        target="skypilot-runpod",
        managed=True,
        overrides=["storage.bucket=s3://mine"],
    ).save()
    said = PlatformAnswer(text="managed job 3: STARTING", name="3")
    monkeypatch.setattr(launched_run, "ask_platform", lambda record: said)
    monkeypatch.setattr("recipes.drivers.bucket_access.probe_bucket", lambda *a: None)
    monkeypatch.setattr("recipes.drivers.shared_record.publish_manifest", lambda *a: None)
    code, _, err = run(capsys, "resume", "mine")
    assert code == 2 and "run mine is alive (managed job 3: STARTING)" in err


def test_a_launch_that_the_platform_never_took_can_be_started_again(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sky", 'case "$*" in *" queue "*) echo "[]" ;; esac')
    bucket = ["storage.bucket=s3://bucket"]
    record = RunRecord(run_id="mine", recipe=SEVEN, target="skypilot-runpod", managed=True, overrides=bucket)
    replace(record, confirmed=False).save()
    with servers.rclone(tmp_path / "disk") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        code, out, err = run(capsys, "resume", "mine")
    assert code == 0 and "run mine on skypilot-runpod" in out, err


def test_flags_after_two_dashes_go_to_the_platform_and_are_kept_for_resume(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sbatch", 'echo "77"')
    up = ["up", SEVEN, "--target", "slurm", "--detach", "--run-id", "mine"]
    assert run(capsys, *up, "--", "--exclude=gpu-7", "--mail-type=END")[0] == 0
    assert "--exclude=gpu-7 --mail-type=END" in (tmp_path / "calls").read_text()
    assert run_record.load_record("mine").flags == ["--exclude=gpu-7", "--mail-type=END"]
    assert "--exclude=gpu-7" in run(capsys, "resume", "mine", "--dry-run")[1].splitlines()[-2]
    code, _, err = run(capsys, "status", "mine", "--", "--long")
    assert code == 2 and "`status` starts no platform" in err
    code, _, err = run(capsys, "demo", "--dry-run", "--", "--fast")
    assert code == 2 and "local has no platform" in err


def test_where_it_cannot_be_told_whether_a_run_is_alive_a_takeover_is_asked_for(
    capsys, monkeypatch, tmp_path
):
    """A store that answers 503, a record that is not whole, a platform that has forgotten the run."""
    stand_in(tmp_path, monkeypatch, "sbatch", 'echo "77"')
    stand_in(tmp_path, monkeypatch, "scancel", "")
    bucket = f"file://{tmp_path}/bucket"
    up = ["up", SEVEN, "--target", "slurm", "--detach", "--run-id", "mine", "--bucket", bucket]
    Attempts(Storage(f"{bucket}/mine/attempts")).take(0, "first")
    (tmp_path / "bucket/mine/attempts/final.json").write_text('{"code": 38}')
    code, _, err = run(capsys, *up)
    assert code == 2 and err.count("\n") == 1
    assert "whether run mine is alive cannot be told" in err and "final.json" in err and "--takeover" in err
    assert not (tmp_path / "calls").exists()
    assert run(capsys, *up, "--takeover")[0] == 0

    def away(argv, **_):
        return subprocess.CompletedProcess(argv, 35, "", "error: listing failed 2 times: 503 Slow Down\n")

    monkeypatch.setattr(launch_checks.bucket_access.subprocess, "run", away)
    record = replace(run_record.load_record("mine"), run_id="other")
    told = launch_checks.earlier_launch(record, {})
    assert told is not None and not told.sure and told.what == "listing failed 2 times: 503 Slow Down"
