"""Ray's own job commands against a run of ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from trainer import config as c

ROOT = Path(__file__).parents[3]
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


class Launched:
    """The launcher of one node around a job, and what it prints."""

    def __init__(self, folder: Path, job: str, watch: c.Watch) -> None:
        config = c.RunConfig(
            run=c.Run(name="one", dir=str(folder / "run")),
            model=c.Model(path=str(folder)),
            watch=watch,
            data=c.Data(path=str(folder)),
            placement=c.Placement(device="cpu", workers_per_node=2),
        )
        (folder / "run.yaml").write_text(c.dump(config))
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTRL_", "RAY_"))}
        env |= {"SPOTRL_TMP": str(folder), "SPOTRL_METADATA": "off", "HOME": str(folder)}
        command = [
            sys.executable,
            "-m",
            "trainer.node",
            "--config",
            str(folder / "run.yaml"),
            "--",
            sys.executable,
            "-c",
            job,
            str(folder / "run"),
        ]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line)

    def line(self, text: str, timeout_s: float = 120.0) -> str:
        """The first line with that text, once it is there."""
        deadline = time.monotonic() + timeout_s
        while not (found := [line for line in self.lines if text in line]):
            assert time.monotonic() < deadline and self.process.poll() is None, "".join(self.lines)
            time.sleep(0.1)
        return found[0].strip()


@pytest.mark.long
def test_rays_job_commands_work_against_a_run(folder):
    run = Launched(folder, WORKS, c.Watch())
    run.line("step 1 of many")
    (published,) = (folder / ".cache/spotrl").glob("*.json")
    told = json.loads(published.read_text())
    (folder / "token").write_text(told["token"])
    env = os.environ | {
        "RAY_ADDRESS": told["url"],
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
    }

    def ray(*arguments: str) -> str:
        done = subprocess.run(
            [Path(sys.executable).with_name("ray"), "job", *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    job = re.search(r"submission_id='(one-\d+)'", ray("list"))
    assert job and "step 1 of many" in ray("logs", job[1])
    assert "forty-two" in ray("submit", "--", "echo", "forty-two")
    ray("stop", "--no-wait", job[1])  # else it waits for an answer of a cluster that ends with the job
    assert run.process.wait(60) == 130
