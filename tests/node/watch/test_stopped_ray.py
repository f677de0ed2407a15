"""Ray's own processes under SIGSTOP: named within seconds, and the job ends by itself.

The launcher, Ray, its actors, the session and the checkpoints are real; the actors only answer.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from dataclasses import replace

import psutil
import pytest

from tests.loops.drill import configure
from tests.loops.jobs import Job
from trainer.exit_codes import EXIT_NODE_LOST, EXIT_OK

pytestmark = pytest.mark.long


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


def test_a_stopped_raylet_is_named_and_ends_the_job(start):
    """Its node counts as lost after some missed heartbeats."""
    job = start(10**6)
    what, began = stopped(job, "raylet")
    assert job.wait(200) == EXIT_NODE_LOST, job.tail()
    print(f"raylet: the job ended after {time.monotonic() - began:.0f} s")
    assert re.search(f"^error: {what}: ", job.tail(), re.MULTILINE), job.tail()
    assert "Traceback" not in job.tail()
    assert not job.pids()


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
