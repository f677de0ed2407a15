"""What a launch leaves in the record, however it ends: nothing costs for ever that no platform has taken."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from desk import bucket as bucket
from desk import elsewhere as elsewhere
from desk import run, stand_in

from recipes.drivers import status
from recipes.presets import get, resolve
from recipes.recipe.spec import override
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from tests.recipes.rendered import render
from tests.waiting import until
from trainer.system import processes

ROOT = Path(__file__).parents[2]
SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"
SPOT = ["up", SEVEN, "--target", "skypilot-runpod", "--bucket", "s3://mine", "--run-id", "mine"]
ON_DEMAND = [*SPOT, "--set", "cluster.spot=never"]
JOB = {"job_id": 1, "job_name": "mine", "status": "RUNNING", "recovery_count": 0}


def sky(tmp_path, monkeypatch, launch="exit 0", jobs="", clusters="", name="sky"):
    """A stand-in for SkyPilot's program: what `launch` does, and the lists that it prints ("": it does not
    answer)."""

    def answer(rows):
        return f"printf '\\033[2mhint\\033[0m\\n'; echo '{rows}'" if rows else "exit 1"

    queue = f'*" queue "*) {answer(jobs)} ;;'
    body = f'case "$*" in {queue} status*) {answer(clusters)} ;; *launch*) {launch} ;; esac'
    stand_in(tmp_path, monkeypatch, name, body)


def listed(capsys):
    """(what `status` prints, in one line; dollars of the run `mine` an hour after its launch)."""
    code, out, _ = run(capsys, "status")
    assert code == 0
    record = run_record.load_record("mine")
    return " ".join(out.split()), replace(record, started_s=record.started_s - 3600).usd()


def test_a_launch_that_the_platform_refused_costs_nothing(capsys, monkeypatch, tmp_path):
    sky(tmp_path, monkeypatch, launch="exit 3", jobs="[]")
    assert run(capsys, *SPOT)[0] == 3
    out, usd = listed(capsys)
    assert "launch failed" in out and "not known to SkyPilot; the launch ended with exit code 3" in out
    assert usd == 0 and "still costing" not in out
    assert run_record.load_record("mine").ended_s > 0


def test_a_launch_that_nobody_can_tell_about_costs_nothing_until_the_platform_has_it(
    capsys, monkeypatch, tmp_path
):
    sky(tmp_path, monkeypatch, launch="exit 3")
    _, out, _ = run(capsys, *SPOT)
    assert "the launch of mine is not confirmed: `python3 launch.py status mine` asks the platform" in out
    out, usd = listed(capsys)
    assert "launch not confirmed" in out and usd == 0 and "still costing" not in out
    sky(tmp_path, monkeypatch, jobs=json.dumps([JOB]))
    out, usd = listed(capsys)
    rate = run_record.load_record("mine").usd_per_hour
    assert rate > 5 and usd == pytest.approx(rate, rel=0.01)
    assert f"still costing ${rate:.2f} per hour (mine ${rate:.2f})" in out and "running" in out


def test_a_job_that_failed_after_it_was_taken_costs_until_its_end(capsys, monkeypatch, tmp_path):
    end = time.time() + 1
    failed = JOB | {"status": "FAILED_SETUP", "failure_reason": "the set-up ended with 2", "end_at": end}
    sky(tmp_path, monkeypatch, launch="exit 100", jobs=json.dumps([failed]))
    assert run(capsys, *SPOT)[0] == 100
    record = run_record.load_record("mine")
    assert (record.confirmed, record.ended_s, record.state) == (True, end, "failed")
    monkeypatch.setattr(status.time, "time", lambda: end + 60)
    out, _ = listed(capsys)
    assert "failed" in out and "the set-up ended with 2" in out and "still costing" not in out


@pytest.mark.parametrize("jobs", ["[]", json.dumps([JOB])])
def test_ctrl_c_during_a_launch_leaves_the_platform_to_say_what_it_has(jobs, capsys, monkeypatch, tmp_path):
    sky(tmp_path, monkeypatch, jobs=jobs, launch=f"touch {tmp_path}/up; trap 'exit 1' INT; sleep 60 & wait")
    process = desk(tmp_path, *SPOT)
    until((tmp_path / "up").exists)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    assert run_record.load_record("mine").confirmed == (jobs != "[]")
    assert not run_record.load_record("mine").ended_s, "SkyPilot's server works on what it was asked for"


def test_a_desk_that_was_killed_leaves_a_launch_that_is_asked_about(capsys, monkeypatch, tmp_path):
    sky(tmp_path, monkeypatch, jobs="[]", launch=f"touch {tmp_path}/up; sleep 60")
    process = desk(tmp_path, *SPOT)
    until((tmp_path / "up").exists)
    process.kill()
    process.wait(30)
    out, usd = listed(capsys)
    assert "launch not confirmed" in out and usd == 0
    record = run_record.load_record("mine")
    replace(record, started_s=record.started_s - 2 * 3600).save()  # what is not known by now was never taken
    assert "launch failed" in listed(capsys)[0]
    sky(tmp_path, monkeypatch, jobs=json.dumps([JOB]))
    run(capsys, "status", "mine")
    assert run_record.load_record("mine").usd() > 5, "evidence wins"


def desk(tmp_path, *arguments):
    """launch.py in a process and a group of its own, with the test's run records."""
    code = (
        "import signal, sys; from pathlib import Path; import launch\n"
        "from recipes.records import manifest, run_record\n"
        "from recipes.drivers import bucket_access, launch_checks, shared_record\n"
        "bucket_access.probe_bucket = shared_record.publish_manifest = "
        "launch_checks.earlier_launch = lambda *a: None\n"
        f"manifest.RUNS = run_record.RUNS = Path({str(run_record.RUNS)!r})\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(launch.main(sys.argv[1:]))"
    )
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, start_new_session=True)


def test_a_submission_that_the_batch_system_refused_is_closed_with_its_words(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sbatch", "echo 'sbatch: error: no such partition' >&2; exit 3")
    assert run(capsys, "up", SEVEN, "--target", "slurm", "--run-id", "mine", "--detach")[0] == 3
    out, _ = listed(capsys)
    assert "launch failed" in out and "sbatch: error: no such partition" in out
    assert run_record.load_record("mine").ended_s


def test_a_program_that_cannot_be_started_closes_the_record(monkeypatch, tmp_path, capsys):
    stand_in(tmp_path, monkeypatch, "sbatch", "")
    (tmp_path / "bin/sbatch").write_text("no program\n")  # a shell would run it, the kernel does not
    with pytest.raises(OSError, match="format"):
        run(capsys, "up", SEVEN, "--target", "slurm", "--run-id", "mine", "--detach")
    assert run_record.load_record("mine").state == "launch failed"


def test_a_run_on_this_machine_that_failed_is_over(capsys, monkeypatch, tmp_path):
    from recipes.drivers import launching

    monkeypatch.setattr(launching, "_foreground", lambda argv, env: (7, False))
    assert run(capsys, "demo", "--run-id", "mine")[0] == 7
    (run_record.RUNS / "mine/launch.log").write_text("step 1\nerror: no memory left\n")
    out, _ = listed(capsys)
    assert "local failed" in out and "exit code 7" in out and run_record.load_record("mine").ended_s


def cluster(state):
    return json.dumps([{"name": "mine", "status": state, "resources_str": "1x(gpus=H100-SXM:8)"}])


def test_a_cluster_whose_job_failed_goes_down_and_is_watched_until_it_has(capsys, monkeypatch, tmp_path):
    sky(tmp_path, monkeypatch, launch="exit 100", clusters=cluster("UP"))
    assert run(capsys, *ON_DEMAND)[0] == 100
    record = run_record.load_record("mine")
    assert record.confirmed and not record.managed and 0 < record.ended_s - time.time() < 90
    out, _ = listed(capsys)
    assert "going down" in out and "exit code 100" in out and "still costing $" in out
    replace(record, ended_s=time.time() - 600, started_s=time.time() - 3600).save()
    out, _ = listed(capsys)
    assert "still costing $" in out, "it was to be gone ten minutes ago, and SkyPilot says that it is up"
    sky(tmp_path, monkeypatch, clusters="[]")
    out, _ = listed(capsys)
    assert "gone" in out and "still costing" not in out
    asked = len((tmp_path / "calls").read_text().splitlines())
    listed(capsys)
    assert len((tmp_path / "calls").read_text().splitlines()) == asked, (
        "what is gone is not asked about again"
    )


def test_a_cluster_goes_down_with_its_job_and_machines_of_managed_jobs_wait_for_the_next_attempt():
    def autostop(*overrides):
        text = next(iter(render(override(get(SEVEN), list(overrides)), "skypilot-runpod").values()))
        return yaml.safe_load(text)["resources"]["autostop"]

    assert autostop() == {"idle_minutes": 3, "down": True}
    assert autostop("cluster.spot=never") == {"idle_minutes": 0, "wait_for": "jobs", "down": True}
    assert autostop("cluster.spot=never", "budget.keep_minutes=30")["idle_minutes"] == 30
    task = next(iter(render(resolve("preflight", []), "skypilot-gcp").values()))
    assert yaml.safe_load(task)["resources"]["autostop"]["idle_minutes"] == 0


def test_machines_of_dstack_wait_for_a_next_attempt_and_for_nothing_else():
    def idle(name, *overrides):
        files = render(override(get(name), list(overrides)), "dstack-gcp").values()
        return {yaml.safe_load(text)["idle_duration"] for text in files}

    assert idle(SEVEN) == {"3m"}, "dstack submits a failed job again after 15 s, and after 30 and 60 more"
    assert idle("preflight") == {"0m"}, "of eight H100 on GCP ten minutes cost $15"
    assert idle("serve", "budget.keep_minutes=20") == {"20m"}


def test_platforms_are_asked_once_however_many_runs_there_are(capsys, monkeypatch, tmp_path):
    for name in ("a", "b", "c"):
        RunRecord(
            run_id=name, recipe=SEVEN, target="skypilot-runpod", managed=True, started_s=time.time()
        ).save()
    RunRecord(run_id="d", recipe=SEVEN, target="skypilot-runpod", managed=True, ended_s=time.time()).save()
    sky(tmp_path, monkeypatch, jobs=json.dumps([JOB | {"job_name": "b"}]))
    run(capsys, "status")
    assert (tmp_path / "calls").read_text().splitlines() == ["sky jobs queue -a -v -o json"]


def test_every_run_is_shown_whole_in_80_columns(capsys, monkeypatch, tmp_path):
    name = "grpo-qwen2-5-vl-72b-lora-mathv60k-of-a-long-name-1123-1612-ab12"
    long = {
        "recipe": SEVEN,
        "target": "skypilot-kubernetes",
        "started_s": time.time() - 4e5,
        "usd_per_hour": 234.5,
    }
    RunRecord(
        run_id=name, planned_usd=23456.0, planned_hours=123.4, confirmed=True, managed=True, **long
    ).save()
    RunRecord(run_id="mine", confirmed=False, managed=True, **long).save()
    RunRecord(run_id="near", recipe="demo", target="local", started_s=time.time() - 60).save()
    (run_record.RUNS / "near/task").mkdir()
    (run_record.RUNS / "near/task/demo.sh").touch()
    progress = {"status": "running"} | processes.own_stamp() | {"pid": 2**30}
    (run_record.RUNS / "near/progress.json").write_text(json.dumps(progress))
    (run_record.RUNS / "near/launch.log").write_text("Traceback\n" + "no memory left " * 20 + "\n\n")
    (run_record.RUNS / "near/metrics.jsonl").write_text('{"step": 41, "reward/mean": 0.5}\n{"step": 42, "rew')
    sky(tmp_path, monkeypatch)
    code, out, _ = run(capsys, "status")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert name in out and "launch not confirmed" in out and "died" in out and "no memory left" in out
    assert "step 41, reward 0.50" in out, "the last whole line"
    code, out, _ = run(capsys, "status", "near")
    assert out.count("no memory left") == 20, "of one run the whole reason"


def test_a_run_that_was_killed_says_by_what():
    from trainer.system.exit_codes import EXIT_NODE_LOST, describe_code

    assert describe_code(-9) == "killed by SIGKILL: nobody was told why"
    assert describe_code(EXIT_NODE_LOST).startswith("exit code 34: ") and describe_code(77) == "exit code 77"
