"""A run on this machine is found by its process, ended, followed and never forgotten while it lives."""

import json
import os
import signal
import subprocess
import time

import pytest

from recipes.drivers import launch_checks, launched_run
from recipes.records import run_process, run_record
from recipes.records.run_record import RunRecord
from tests.conftest import ROOT
from tests.recipes.rendered import launch_commands
from tests.waiting import until
from trainer.system import processes

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
TASK = """\
trap 'echo asked to end >> runs/mine/launch.log; exit 143' TERM
echo begun >> runs/mine/launch.log
while :; do sleep 0.1; done
"""


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_record, "RUNS", tmp_path / "runs")
    made = RunRecord(run_id="mine", recipe="demo", target="local", started_s=time.time())
    made.save()
    (tmp_path / "runs/mine/task").mkdir()
    (tmp_path / "runs/mine/task/demo.sh").write_text(TASK)
    return made


@pytest.fixture
def start(record, tmp_path):
    """Starts the run's command, waits until its task runs, and ends what is left of it."""
    started = []

    def run(detach=False):
        (up,) = launch_commands(record, [], {"RUN_ID": "mine"}, [], detach).up
        started.append(subprocess.Popen(up, cwd=tmp_path, env=ENVIRONMENT | {"RUN_ID": "mine"}))
        until(lambda: (tmp_path / "runs/mine/launch.log").exists() and run_process.process_of("mine"))
        return run_process.process_of("mine")

    yield run
    for process in started:
        if pid := run_process.process_of("mine"):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def call(record, what, folder):
    (words,) = getattr(launch_commands(record, [], {"RUN_ID": "mine"}, [], False), what)
    return subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("detach", [False, True])
def test_it_ends_by_its_own_way(start, record, tmp_path, detach):
    pid = start(detach)
    assert pid and not launched_run.gone_here(record)
    assert call(record, "down", tmp_path).returncode == 0
    until(lambda: processes.has_ended(pid))
    assert (tmp_path / "runs/mine/launch.log").read_text() == "begun\nasked to end\n"
    assert launched_run.gone_here(record)


def test_a_second_launch_of_it_is_refused_before_anything_is_touched(start, record, tmp_path):
    pid = start()
    lives = launch_checks.earlier_launch(RunRecord(run_id="mine", recipe="demo", target="local"), {})
    assert lives and lives.sure and lives.what == f"process {pid} on this machine"


def test_down_finds_a_run_whose_process_id_was_lost_by_its_launcher(start, record, tmp_path):
    pid = start()
    (tmp_path / "runs/mine/local.pid").unlink()
    (tmp_path / "runs/mine/.launcher.lock").write_text(json.dumps({"pid": pid, "host": "here"}).ljust(256))
    assert call(record, "down", tmp_path).returncode == 0
    until(lambda: processes.has_ended(pid))


def test_down_that_finds_nothing_of_a_run_that_beats_says_so_and_fails(record, tmp_path):
    with subprocess.Popen(["sleep", "300"]) as beating:
        stamp = processes.own_stamp() | {"pid": beating.pid}
        stamp["pid_started"] = processes.started_ticks(beating.pid)
        (tmp_path / "runs/mine/progress.json").write_text(json.dumps({"status": "running"} | stamp))
        done = call(record, "down", tmp_path)
        assert done.returncode == 2 and f"mine goes on: process {beating.pid}" in done.stderr
        assert "Traceback" not in done.stderr
        beating.kill()


def test_a_process_that_has_its_number_by_now_is_left_alone(record, tmp_path):
    with subprocess.Popen(["sleep", "300"], env={"RUN_ID": "another"}) as other:
        (tmp_path / "runs/mine/local.pid").write_text(f"{other.pid}\n")
        done = call(record, "down", tmp_path)
        assert "no process of mine is left" in done.stderr and other.poll() is None
        other.kill()


@pytest.mark.parametrize("content", ["4194303", "", "-1", "x", "[]"])
def test_of_a_run_that_has_ended_it_says_that_and_nothing_else(record, tmp_path, content):
    (tmp_path / "runs/mine/local.pid").write_text(content)
    (tmp_path / "runs/mine/.launcher.lock").write_text(content)
    done = call(record, "down", tmp_path)
    assert done.stderr == "no process of mine is left\n" and not done.stdout and done.returncode == 0


def test_logs_of_a_run_that_has_ended_return(record, tmp_path):
    (tmp_path / "runs/mine/launch.log").write_text("first\nlast\n")
    assert call(record, "logs", tmp_path).stdout == "first\nlast\n"


def test_logs_follow_a_run_until_it_ends(start, record, tmp_path):
    pid = start()
    (words,) = launch_commands(record, [], {"RUN_ID": "mine"}, [], False).logs
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout.readline() == "begun\n"
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)  # as its desk does
        assert follower.communicate(timeout=60)[0] == "asked to end\n" and follower.returncode == 0


def test_a_run_that_never_began_is_no_launch_for_ever(record):
    assert not launched_run.gone_here(record), "it may be on its way"
    old = RunRecord(run_id="mine", recipe="demo", target="local", started_s=time.time() - 3600)
    assert launched_run.gone_here(old)
    assert not launched_run.gone_here(RunRecord(run_id="mine", recipe="demo", target="local", desk="far"))
