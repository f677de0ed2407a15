"""What a desk sees of the machines that sample for a run: states, logs and dollars."""

import json
import time
from dataclasses import replace

import pytest
from desk import bucket as bucket
from desk import elsewhere as elsewhere
from desk import run, stand_in
from test_fleet_launch import SEVEN, called, launched, workers

from recipes.drivers import platform_state, worker_view
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from trainer import config as configuration
from trainer.config import RunConfig


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
    said = platform_state.ask_platform(record)
    assert said.state == "2 running, 1 failed" and not said.ended_s
    assert said.text.count("worker ") == 3
    for row in rows:
        row["status"] = "SUCCEEDED"
    stand_in(tmp_path, monkeypatch, "sky", f"echo '{json.dumps(rows)}'")
    said = platform_state.ask_platform(record)
    assert said.state == "finished" and said.ended_s


def test_dollars_of_a_thousand_samples_by_gpu():
    rows = [
        {"fleet/sampled_NVIDIA-L40S": 300.0},
        {"fleet/sampled_NVIDIA-L40S": 300.0, "fleet/sampled_NVIDIA-A100-SXM4-80GB": 600.0},
        {"reward/mean": 0.5},  # replayed from the log
    ]
    rates = [("L40S", 3.6), ("A100-80GB", 7.2), ("", 0.0)]
    # 100 s a step: $0.10 of L40S and $0.20 of A100 for 256 samples each
    found = worker_view.usd_per_1000(rows, rates, 512, 100.0)
    assert found == {"L40S": pytest.approx(0.1 / 0.256), "A100-80GB": pytest.approx(0.2 / 0.256)}
    assert worker_view.usd_per_1000([], rates, 512, 100.0) == {}


def test_dollars_of_a_thousand_samples_of_the_run_s_own_gpus(elsewhere):
    """Two of eight GPUs of each node sample: a quarter of what the run costs. In `status` while it runs, in
    the report afterwards."""
    split = ["fleet.workers=only", "fleet.gpus_per_node=2", "rollout.tensor_parallel=1", "cluster.gpu=H100"]
    own = RunRecord(run_id="mine", recipe=SEVEN, target="skypilot-runpod", confirmed=True, overrides=split)
    replace(own, usd_per_hour=16.0, started_s=time.time() - 1800).save()
    folder = run_record.RUNS / "mine"
    (folder / "config.yaml").write_text(configuration.dump(RunConfig()))
    sampled = '"fleet/sampled_NVIDIA-H100-80GB-HBM3": 512, "time/step_s": 90.0'
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, {sampled}}}\n{{"step": 2, {sampled}}}\n')
    samples = RunConfig().samples_per_step
    a_step = 16 / 4 * 90 / 3600
    assert worker_view.worker_lines("mine") == [
        f"1,000 samples from H100: ${1000 * a_step / samples:.3f}, idle time included"
    ]
    whole = worker_view.usd_per_1000_of("mine", folder)
    assert whole == {"H100": pytest.approx(1000 * 16 / 4 / 2 / (2 * samples), rel=0.01)}


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


def test_dollars_of_a_thousand_samples_of_a_whole_run_are_in_its_report(capsys, monkeypatch, tmp_path):
    launched(capsys, monkeypatch, tmp_path, "2xL40S:spot")
    replace(workers(), confirmed=True, counted_usd=2.0, ended_s=time.time()).save()
    folder = run_record.RUNS / "mine"
    (folder / "config.yaml").write_text(configuration.dump(RunConfig()))
    metrics = '{"step": 1, "fleet/sampled_NVIDIA-L40S": 900}\n{"step": 40, "fleet/sampled_NVIDIA-L4": 300}\n'
    (folder / "metrics.jsonl").write_text(metrics)  # of two attempts, the second with other machines
    roster = [{"worker": "w0", "device": "NVIDIA L40S", "lives": False, "why": "over", "completions": 0}]
    (folder / "fleet.json").write_text(json.dumps({"workers": roster}))
    assert run(capsys, "report", "mine")[0] == 0
    samples = 40 * RunConfig().samples_per_step
    page = (folder / "report.html").read_text()
    assert f"<td>L40S</td><td>${2000 / (samples * 0.75):,.3f}</td>" in page
