"""What a desk sees of the machines that sample for a run: states, logs and dollars."""

import json
from dataclasses import replace

from desk import bucket as bucket
from desk import elsewhere as elsewhere
from desk import run, stand_in
from test_fleet_launch import SEVEN, called, launched, workers

from recipes.drivers import launched_run
from recipes.records import run_record


def test_logs_of_a_worker_where_one_command_follows_all(capsys, monkeypatch, tmp_path):
    launched(capsys, monkeypatch, tmp_path, "3xL40S:spot")
    replace(workers(), managed=True, cluster="5").save()
    (tmp_path / "calls").unlink()
    assert run(capsys, "logs", "mine", "--worker", "2")[0] == 0
    assert "sky jobs logs 5" in called(tmp_path)


def test_logs_of_one_worker(capsys, monkeypatch, tmp_path):
    launched(capsys, monkeypatch, tmp_path, "3xL40S:spot")
    mine = workers()
    (tmp_path / "calls").unlink()
    assert run(capsys, "logs", "mine", "--worker", "2")[0] == 0
    assert f"sky jobs logs -n {mine.run_id}-2" in called(tmp_path)
    code, _, err = run(capsys, "logs", "mine", "--worker", "4")
    assert code == 2 and "3 machines were started from here for mine" in err


def test_workers_that_have_ended_are_told_one_by_one_and_their_logs_are_found(capsys, monkeypatch, tmp_path):
    """By a job's name SkyPilot finds the log of one that is running only."""
    launched(capsys, monkeypatch, tmp_path, "2xL40S:spot")
    mine = workers()
    rows = []
    for number, name in ((1, "mine"), (2, f"{mine.run_id}-1"), (3, f"{mine.run_id}-2")):
        rows.append({"job_id": number, "job_name": name, "status": "SUCCEEDED", "recovery_count": number - 1})
    stand_in(tmp_path, monkeypatch, "sky", f"echo '{json.dumps(rows)}'")
    assert run(capsys, "logs", "mine", "--worker", "2")[0] == 0
    assert called(tmp_path)[-1] == "sky jobs logs 3"
    out = run(capsys, "status", "mine")[1]
    line = f"{mine.run_id}: worker 2: managed job 3: SUCCEEDED, no machine yet, recovered 2 times"
    assert line in out.splitlines() and "managed job 1: SUCCEEDED" in out


def test_the_state_of_several_jobs_is_told_together(monkeypatch, tmp_path):
    rows = []
    for number, status in ((1, "RUNNING"), (2, "RUNNING"), (3, "FAILED")):
        rows.append({"job_id": number, "job_name": f"w-{number}", "status": status, "recovery_count": 0})
    stand_in(tmp_path, monkeypatch, "sky", f"echo '{json.dumps(rows)}'")
    record = run_record.RunRecord(
        run_id="w", recipe=SEVEN, target="skypilot-runpod", managed=True, jobs=3, samples_for="mine"
    )
    said = launched_run.ask_platform(record)
    assert said.state == "2 running, 1 failed" and not said.ended_s
    assert said.text.count("worker ") == 3
    for row in rows:
        row["status"] = "SUCCEEDED"
    stand_in(tmp_path, monkeypatch, "sky", f"echo '{json.dumps(rows)}'")
    said = launched_run.ask_platform(record)
    assert said.state == "finished" and said.ended_s


def test_status_names_the_workers_that_outlive_their_run(capsys, monkeypatch, tmp_path):
    """Their job may still look for a machine."""
    launched(capsys, monkeypatch, tmp_path, "1xL40S:spot")
    name = workers().run_id
    mine = {"job_id": 1, "job_name": "mine", "status": "SUCCEEDED", "recovery_count": 0}
    for status, left in (("STARTING", True), ("SUCCEEDED", False)):
        theirs = mine | {"job_id": 2, "job_name": f"{name}", "status": status}
        stand_in(tmp_path, monkeypatch, "sky", f"echo '{json.dumps([mine, theirs])}'")
        said = run(capsys, "status", "mine")[1]
        assert (f"mine has ended, and {name} may still rent machines" in said) == left, said
        assert ("`python3 launch.py down mine` ends them now" in said) == left
