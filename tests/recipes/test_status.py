"""What `status` says of a run: cost, last step, and what its engine says."""

import json
import subprocess
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from desk import elsewhere as elsewhere
from desk import run, stand_in

from recipes.drivers import fetched_runs, launched_run, launching, status
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from trainer.config import RunConfig, override
from trainer.config.run_folder import SERVING
from trainer.sampling.serve import note_state

ROOT = Path(__file__).parents[2]


def test_status_adds_up_dollars_and_shows_the_last_step(capsys, tmp_path):
    record = RunRecord(
        run_id="mine", recipe="demo", target="local", started_s=time.time() - 7200, usd_per_hour=10.0
    )
    record.save()
    (tmp_path / "runs/mine/metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.1}\n{"step": 2, "reward/mean": 0.5}\n'
    )
    code, out, _ = run(capsys, "status")
    assert code == 0 and "20.00" in out and "2, reward 0.50" in out
    begun = replace(record, earlier_usd=5.0)
    assert begun.usd() == pytest.approx(25.0, abs=0.1)
    ended = replace(begun, ended_s=begun.started_s + 1800)
    assert (ended.hours(), ended.usd()) == (0.5, 10.0)
    idling = replace(begun, ended_s=time.time() + 9000)
    assert idling.usd() == pytest.approx(25.0, abs=0.1), "the machine is still idling"


def answers(tmp_path, monkeypatch, name, data):
    stand_in(tmp_path, monkeypatch, name, f"echo 'a hint'; cat <<'END'\n{json.dumps(data)}\nEND")


def test_status_of_a_managed_job_is_what_its_engine_says(capsys, monkeypatch, tmp_path):
    RunRecord(
        run_id="mine", recipe="r", target="skypilot-runpod", managed=True, started_s=1000.0, usd_per_hour=1.5
    ).save()
    job = {"job_id": 1, "job_name": "mine", "status": "FAILED", "recovery_count": 0}
    again = job | {
        "job_id": 2,
        "status": "SUCCEEDED",
        "recovery_count": 2,
        "end_at": 8200.0,
        "infra": "RunPod (CA)",
    }
    answers(tmp_path, monkeypatch, "sky", [again, job, job | {"job_name": "other"}])
    code, out, _ = run(capsys, "status", "mine")
    assert code == 0 and "managed job 2: SUCCEEDED, RunPod (CA), recovered 2 times" in out and " 3.00" in out
    assert run_record.load_record("mine").ended_s == 8200.0
    (tmp_path / "runs/mine/task").mkdir()
    (tmp_path / "runs/mine/task/r.yaml").touch()
    run(capsys, "logs", "mine")  # SkyPilot finds a job that has ended by its number only
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "sky jobs logs 2"


def test_a_dstack_run_has_the_servers_own_cost_state_and_machines(capsys, monkeypatch, tmp_path):
    """dstack gets 0 for what it must not start again, so its "done" alone is no success."""
    RunRecord(run_id="mine", recipe="r", target="dstack-runpod", started_s=time.time() - 60).save()
    node = {"price": 28.7, "instance_type": {"name": "H100 x8"}, "region": "US-KS-2"}
    now = {
        "run_spec": {"run_name": "mine"},
        "submitted_at": "2026-01-01T00:00:00",
        "last_processed_at": "2026-01-01T00:00:00Z",
        "status": "running",
        "cost": 3.25,
        "jobs": [{"job_submissions": [{"job_provisioning_data": node}]}] * 4,
    }

    def said(log="", **changes):
        listed = json.dumps({"project": "main", "runs": [now | changes]})
        body = f"case $1 in ps) echo '{listed}' ;; logs) printf '{log}\\n' ;; esac"
        stand_in(tmp_path, monkeypatch, "dstack", body)
        return " ".join(run(capsys, "status mine")[1].split())

    out = said()
    assert "dstack run mine: running" in out and " 3.25" in out
    assert "rented: 4 x H100 x8 in US-KS-2: $114.80 per hour" in out
    assert run_record.load_record("mine").ended_s == 0.0
    end = {"termination_reason": "stopped_by_user", "cost": 4.5}
    assert "terminated (stopped_by_user)" in said(status="terminated", **end)
    assert run_record.load_record("mine").usd() == 4.5 and " 4.50" in run(capsys, "status")[1]
    log = "step 1\\nerror: no such bucket\\nspotrl: ended for good: exit code 2"
    assert "FAILED: spotrl: ended for good: exit code 2" in said(log, status="done")
    assert "run mine: done" in said("step 31\\nfinished", status="done")


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (
            "echo 'aws_access_key_id ******'",
            "dstack has no secret aws_secret_access_key: run dstack secret set",
        ),
        ("echo 'No default project' >&2; exit 1", "dstack secret list said 'No default project'"),
    ],
)
def test_secrets_that_the_server_lacks_are_refused_before_machines_are_rented(
    says, message, capsys, monkeypatch, tmp_path
):
    stand_in(tmp_path, monkeypatch, "dstack", says)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    code, _, err = run(capsys, "up grpo-qwen2.5-vl-72b-mathv60k --target dstack-runpod --bucket s3://mine")
    assert code == 2 and message in err and err.count("\n") == 1
    assert (tmp_path / "calls").read_text() == "dstack secret list\n" and not (tmp_path / "runs").exists()


def test_what_was_rented_and_what_was_planned_stand_beside_each_other(capsys, monkeypatch, tmp_path):
    """Planned on RunPod; the engine got GCP's spot, then its on-demand machines."""
    record = RunRecord(
        run_id="mine",
        recipe="grpo-qwen2.5-vl-7b-mathv60k",
        target="skypilot",
        managed=True,
        usd_per_hour=11.0,
        started_s=time.time() - 3600,
        planned_usd=321.0,
        planned_hours=25.5,
    )
    record.save()
    job = {
        "job_id": 1,
        "job_name": "mine",
        "status": "RUNNING",
        "recovery_count": 0,
        "infra": "GCP (us-central1)",
    }
    job |= {
        "cloud": "GCP",
        "accelerators": {"A100-80GB": 8},
        "cluster_resources": "1x[spot](gpus=A100-80GB:8)",
    }
    answers(tmp_path, monkeypatch, "sky", [job])
    out = " ".join(run(capsys, "status", "mine")[1].split())
    assert (
        "rented: GCP (us-central1), 1x[spot](gpus=A100-80GB:8): $16.22 per hour (at the launch the cheapest"
        in out
    )
    assert " 1.0 (25.5) 16.22 (321) " in out, "hours and planned hours, dollars and planned dollars"
    answers(tmp_path, monkeypatch, "sky", [job | {"cluster_resources": "1x(gpus=A100-80GB:8)"}])
    run(capsys, "status", "mine")
    known = run_record.load_record("mine")
    assert [round(usd, 2) for _, usd, _ in known.rented] == [16.22, 40.55]
    begun = time.time() - 7200
    past = [(begun, 16.0, "spot"), (begun + 3600, 40.0, "on demand")]
    assert replace(known, started_s=begun, rented=past).usd() == pytest.approx(56.0, abs=0.1)
    assert fetched_runs.run_costs(known)["planned_usd"] == 321.0


def test_a_failed_run_is_shown_with_the_line_that_says_why(capsys, tmp_path):
    RunRecord(
        run_id="mine",
        recipe="demo",
        target="local",
        started_s=time.time() - 60,
        ended_s=time.time(),
        state="failed",
        why="exit code 2",
    ).save()
    (tmp_path / "runs/mine/launch.log").write_text("error: data.path has no split test\nstopping\n")
    assert "exit code 2: data.path has no split test" in run(capsys, "status")[1]


@pytest.mark.parametrize(
    ("progress", "log", "reason"),
    [
        (
            {"why": "rank 1 on node 0 is stopped (state T)", "ended_unix_s": 4e9},
            "step 1 reward 0.904\n",
            "exit code 34: rank 1 on node 0 is stopped (state T)",
        ),
        ({}, "error: the disk is full\nstep 1 reward 0.904\n", "exit code 34: the disk is full"),
        (
            {"why": "of an earlier launch", "ended_unix_s": 1.0},
            "step 1 reward 0.904\n",
            "exit code 34: another node, or a rank, vanished, did not come, or hangs",
        ),
    ],
)
def test_a_launch_that_ended_is_kept_with_the_reason_that_the_run_gave(
    capsys, tmp_path, progress, log, reason
):
    record = RunRecord(run_id="mine", recipe="demo", target="local", started_s=time.time() - 60)
    record.save()
    (tmp_path / "runs/mine/progress.json").write_text(json.dumps({"status": "failed"} | progress))
    (tmp_path / "runs/mine/launch.log").write_text(log)
    launched_run.settle_launch(record, 34, False, 0)
    assert run_record.load_record("mine").why == reason
    assert reason in " ".join(run(capsys, "status")[1].split())


def test_ctrl_c_is_not_why_a_run_ended_that_a_guard_had_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "_foreground", lambda argv, env: (2, True))
    commands = Namespace(up=[["bash", "task.sh"]])
    record = RunRecord(run_id="mine", recipe="demo", target="local")
    assert launching._run(commands, record, {}) == 2
    monkeypatch.setattr(launching, "_foreground", lambda argv, env: (-2, True))
    assert launching._run(commands, record, {}) == 130


def test_a_server_that_was_left_to_itself_and_ended_is_not_launched(capsys, tmp_path):
    RunRecord(
        run_id="mine", recipe="serve", target="local", started_s=time.time() - 60, confirmed=True
    ).save()
    (tmp_path / "runs/mine/local.pid").write_text("4194303")  # no such process
    (tmp_path / "runs/mine/local.log").write_text("listening\nerror: the model is gone\n")
    out = run(capsys, "status")[1]
    assert "launched" not in out.split("mine")[1] and "ended" in out and "the model is gone" in out


@pytest.mark.parametrize("number", ["word", "NaN", [1], None, 10**400, {"a": 1}])
def test_no_line_of_a_runs_metrics_costs_its_status(capsys, tmp_path, number):
    RunRecord(run_id="mine", recipe="demo", target="local", started_s=time.time() - 60).save()
    lines = [{"step": 7, "reward/mean": 0.5}, {"step": number, "reward/mean": 0.1}]
    lines += [{"step": 8, "time/unix_s": number, "reward/mean": number, "fleet/samples_L40S": number}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "runs/mine/metrics.jsonl").write_text(text)
    (tmp_path / "runs/mine/progress.json").write_text('{"status": ["running"], "pid": "../../etc"}')
    for command in (["status"], ["status", "mine"], ["report", "mine"]):
        code, out, err = run(capsys, *command)
        assert code == 0 and "Traceback" not in err, err
    assert "8" in run(capsys, "status")[1]


def test_a_row_counts_all_launches_of_its_run(capsys):
    now = time.time()
    RunRecord(
        run_id="mine",
        recipe="grpo-qwen2.5-vl-7b-mathv60k",
        target="slurm",
        started_s=now - 3600,
        earlier_hours=5.0,
        earlier_usd=50.0,
        first_started_s=now - 30 * 3600,
    ).save()
    out = run(capsys, "status")[1]
    assert (
        time.strftime("%m-%d %H:%M", time.gmtime(now - 30 * 3600)) in out
        and " 6.0 " in out
        and "50.00" in out
    )


def test_what_has_not_begun_to_train_says_how_far_it_is(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    record = RunRecord(run_id="mine", recipe="demo", target="local", started_s=time.time())
    record.save()
    with subprocess.Popen(["sleep", "60"], env={"RUN_ID": "mine"}) as process:
        (tmp_path / "runs/mine/local.pid").write_text(str(process.pid))
        assert status.state_of(record) == "preparing (1 of 3)"
        (tmp_path / ".venvs/cpu").mkdir(parents=True)
        (tmp_path / ".venvs/cpu/.stamp").touch()
        assert status.state_of(record) == "preparing (2 of 3)"
        process.kill()


def test_a_server_that_answers_is_serving_until_its_process_is_gone(tmp_path):
    record = RunRecord(run_id="mine", recipe="serve", target="local", started_s=time.time())
    record.save()
    config = override(RunConfig(), [f"run.dir={tmp_path}/runs/mine"])
    note_state(config, SERVING)
    assert status.state_of(record) == "serving"
    path = tmp_path / "runs/mine/progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 2**22 - 1, "pid_started": 7}))
    assert status.state_of(record) == "died"
