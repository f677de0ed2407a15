"""Ray's own processes under SIGSTOP: named within seconds, and the job ends by itself.

The launcher, Ray, its actors, the session and the checkpoints are real; the actors only answer.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from tests.loops.drill import configure
from tests.loops.jobs import Job
from trainer.config import RunConfig, override
from trainer.node.launch import job_watch, ray_node
from trainer.observe.phases import Phases
from trainer.system.exit_codes import EXIT_NODE_LOST, EXIT_OK


@pytest.fixture
def start(tmp_path):
    """Starts a launcher whose loop calls two actors in every step; a short path, for the names of Ray's
    sockets."""
    started: list[Job] = []
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")

    def begin(steps: int) -> Job:
        base = configure(tmp_path, steps, 2, standin=True)
        checkpoint = replace(base.checkpoint, every_steps=4, remote="", export_hf="never")
        config = replace(base, run=replace(base.run, dir=f"{folder}/run"), checkpoint=checkpoint)
        own = {"SPOTRL_TMP": folder, "STANDIN_ACTORS": "2", "STANDIN_STEP_S": "1"}
        command = ("--", sys.executable, "-m", "tests.loops.standin", "--config", f"{folder}/run.yaml")
        started.append(Job(config, tmp_path / "job", own, "trainer.node", after=command))
        shutil.copy(started[0].path, f"{folder}/run.yaml")
        return started[0].start()

    yield begin
    for job in started:
        job.kill()
    shutil.rmtree(folder, ignore_errors=True)


def stopped(job: Job, name: str) -> tuple[str, float]:
    """Stops one of Ray's processes in step 5; what has to be said of it, and when it was stopped."""
    job.until(lambda: job.progress().get("step", 0) >= 5, 300)
    (process,) = [one for one in map(psutil.Process, job.pids()) if one.name() == name]
    process.suspend()
    began = time.monotonic()
    what = rf"Ray's {name} \(process {process.pid}\) on node 0 is stopped"
    job.until(lambda: re.search(f"warning: {what}", job.tail()), 60, 0.1)
    print(f"{name}: named after {time.monotonic() - began:.0f} s")
    return what, began


@pytest.mark.long
def test_a_stopped_raylet_is_named_and_ends_the_job(start):
    """Its node counts as lost after some missed heartbeats."""
    job = start(10**6)
    what, began = stopped(job, "raylet")
    assert job.wait(200) == EXIT_NODE_LOST, job.tail()
    print(f"raylet: the job ended after {time.monotonic() - began:.0f} s")
    assert re.search(f"^error: {what}: ", job.tail(), re.MULTILINE), job.tail()
    assert "Traceback" not in job.tail()
    assert not job.pids()


@pytest.mark.long
def test_a_stopped_gcs_is_named_and_the_job_comes_to_its_end(start):
    """No step needs it. Ray cannot tell of the job's end, and no machine may wait for that."""
    job = start(25)
    stopped(job, "gcs_server")
    job.until(lambda: job.progress().get("status") == "finished", 200, 0.1)
    began = time.monotonic()
    assert job.wait(240) == EXIT_OK, job.tail()
    print(f"gcs_server: the launcher ended {time.monotonic() - began:.0f} s after the run")
    assert job.metrics()[-1]["step"] == 25 and "Traceback" not in job.tail()
    assert not job.pids()


@pytest.fixture
def watch(free_port, tmp_path, monkeypatch):
    """What watches a job whose Ray does not answer; its driver is this process."""
    monkeypatch.setattr(job_watch, "UNHEARD_S", 0.3)
    ports = ray_node.Ports(dashboard=free_port)
    ray = ray_node.RayNode(address="127.0.0.1", ports=ports, cpus=1, gpus=0, env={"SPOTRL_TMP": "/tmp"})
    ray.dashboard_host = "127.0.0.1"
    config = override(RunConfig(), [f"run.dir={tmp_path}"])
    launcher = SimpleNamespace(
        config=config, began_unix_s=time.time() - 1, beacons=lambda ray: tmp_path, ray=ray, others=None
    )
    launcher.lines = []
    launcher.say = launcher.lines.append
    driver = tmp_path / "driver"
    driver.write_text(str(os.getpid()))
    yield job_watch.JobWatch(launcher, ray_node.Job(ray, "x", driver))  # ty: ignore
    shutil.rmtree(ray.temp)


def test_a_job_that_ray_does_not_tell_of_ends_by_what_the_run_says(watch, tmp_path):
    phases = Phases(tmp_path)
    phases.begin(1)
    assert watch._ended() is None
    time.sleep(0.4)
    assert watch._ended() is None, "it runs"
    phases.finish()
    assert watch._ended() is None, "Ray may tell of it yet"
    time.sleep(0.4)
    assert (watch._ended().status, watch._ended().code) == ("SUCCEEDED", 0)


def test_a_driver_that_is_gone_is_lost_where_ray_does_not_tell_of_it(watch, tmp_path):
    Phases(tmp_path).begin(1)
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "driver").write_text(str(gone.pid))
    assert watch._ended() is None
    time.sleep(0.4)
    assert watch._ended().code == EXIT_NODE_LOST


def test_a_stopped_child_of_ray_is_said_once(watch, monkeypatch):
    monkeypatch.setattr(job_watch, "RAY_LOOK_S", 0.0)
    watch.ray.process = subprocess.Popen(["bash", "-c", "sleep 60 & wait"], start_new_session=True)
    try:
        bash = psutil.Process(watch.ray.process.pid)
        while not (children := bash.children()) or children[0].name() != "sleep":  # forked, not yet itself
            time.sleep(0.02)
        watch._look_at_ray()
        assert watch.head.lines == []
        children[0].suspend()
        while children[0].status() != psutil.STATUS_STOPPED:  # on a busy machine not at once
            time.sleep(0.02)
        watch._look_at_ray()
        watch._look_at_ray()
        (said,) = watch.head.lines
        assert f"Ray's sleep (process {children[0].pid}) on node 0 is stopped (state T)" in said
    finally:
        os.killpg(watch.ray.process.pid, signal.SIGKILL)
