"""Ray's own job commands against a run of ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.loops.jobs import Job
from trainer import config as c

WORKS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(33))
print("step 1 of many", flush=True)
time.sleep(300)
"""


@pytest.fixture
def folder():
    """A short path: the names of Ray's sockets may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="dbg-", dir="/tmp") as made:
        yield Path(made)


@pytest.mark.long
def test_rays_job_commands_work_against_a_run(folder):
    here = ["run.name=one", f"run.dir={folder}/run", f"model.path={folder}", f"data.path={folder}"]
    config = c.override(c.RunConfig(), [*here, "placement.device=cpu", "placement.workers_per_node=2"])
    own = {"SPOTRL_TMP": str(folder), "HOME": str(folder)}
    run = Job(config, folder, own, "trainer.node", after=("--", sys.executable, "-c", WORKS)).start()
    run.until(lambda: "step 1 of many" in run.tail(), 120, 0.1)
    (published,) = (folder / ".cache/spotrl").glob("*.json")
    told = json.loads(published.read_text())
    (folder / "token").write_text(told["token"])
    env = os.environ | {"RAY_ADDRESS": told["url"], "RAY_AUTH_MODE": "token"}
    env["RAY_AUTH_TOKEN_PATH"] = str(folder / "token")

    def ray(*arguments: str) -> str:
        command = [Path(sys.executable).with_name("ray"), "job", *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    job = re.search(r"submission_id='(one-\d+)'", ray("list"))
    assert job and "step 1 of many" in ray("logs", job[1])
    assert "forty-two" in ray("submit", "--", "echo", "forty-two")
    ray("stop", "--no-wait", job[1])  # else it waits for an answer of a cluster that ends with the job
    assert run.wait(60) == 130
