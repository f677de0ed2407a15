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
from trainer.exit_codes import EXIT_NODE_LOST

pytestmark = pytest.mark.long


@pytest.fixture
def job(tmp_path):
    """A launcher whose loop calls two actors in every step; a short path, for the names of Ray's sockets."""
    base = configure(tmp_path, 10**6, 2, standin=True)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    checkpoint = replace(base.checkpoint, every_steps=4, remote="", export_hf="never")
    config = replace(base, run=replace(base.run, dir=f"{folder}/run"), checkpoint=checkpoint)
    own = {"SPOTRL_TMP": folder, "STANDIN_ACTORS": "2"}
    command = ("--", sys.executable, "-m", "tests.loops.standin", "--config", f"{folder}/run.yaml")
    started = Job(config, tmp_path / "job", own, "trainer.node", after=command)
    shutil.copy(started.path, f"{folder}/run.yaml")
    yield started.start()
    started.kill()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_process_of_ray_that_is_stopped_is_named_and_ends_the_job(job, name):
    job.until(lambda: job.progress().get("step", 0) >= 5, 300)
    (process,) = [one for one in map(psutil.Process, job.pids()) if one.name() == name]
    process.suspend()
    began = time.monotonic()
    what = rf"Ray's {name} \(process {process.pid}\) on node 0 is stopped"
    job.until(lambda: re.search(f"warning: {what}", job.tail()), 60, 0.1)
    named = time.monotonic() - began
    assert job.wait(300) == EXIT_NODE_LOST
    print(f"{name}: named after {named:.0f} s, the job ended after {time.monotonic() - began:.0f} s")
    assert re.search(f"^error: {what}: ", job.tail(), re.MULTILINE), job.tail()
    assert "Traceback" not in job.tail()
    assert not job.pids()
