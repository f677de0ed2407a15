"""Ray's own tools against a run of ours: the post-mortem debugger at a rank that raised, and the job
commands."""

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
from trainer.observe import post_mortem

ROOT = Path(__file__).parents[3]
RAISES = """
import sys, ray
from trainer.observe import beacon, post_mortem
from trainer.observe.phases import Phases

class Rank:
    def start(self):
        beacon.start_beacon(0)
        post_mortem.install_debugger((KeyError,))

    def lose(self):
        raise KeyError("the driver deals with this one")

    def fail(self, row):
        half = row / 2
        raise ValueError(f"row {row} is broken")

ray.init(logging_level="ERROR")
rank = ray.remote(Rank).options(num_cpus=1).remote()
ray.get(rank.start.remote())
try:
    ray.get(rank.lose.remote())
except KeyError:
    print("the first error was dealt with", flush=True)
phases = Phases(sys.argv[1])
phases.begin(1, 1)
with phases("update"):
    ray.get(rank.fail.remote(84))
"""
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
def test_a_rank_that_raises_waits_for_a_debugger_and_the_watchdog_lets_it(folder):
    run = Launched(folder, RAISES, c.Watch(post_mortem=True, first_s=3.0))
    told = run.line("waits for a debugger")
    assert told.startswith(
        "rank 0 on node 0 has raised ValueError: row 84 is broken and waits for a debugger; on node 0:"
    )
    assert "warning: no progress in phase update of step 1" in run.line("no progress")
    assert run.process.poll() is None and any("the first error was dealt with" in line for line in run.lines)
    attached = subprocess.Popen(
        ["sh", "-c", told.partition("on node 0: ")[2]],
        stdin=subprocess.PIPE,
        bufsize=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert attached.stdin and attached.stdout
    for until, typed in (("press enter to refresh: ", "0"), ("(Pdb) ", "p half"), ("42.0", "c")):
        said = b""
        while until.encode() not in said:
            piece = attached.stdout.read(1)
            assert piece, said.decode()
            said += piece
        attached.stdin.write(typed.encode() + b"\n")
    assert run.process.wait(60) == 1  # as without a debugger
    assert "ValueError: row 84 is broken" in (folder / "run/launch.log").read_text()
    attached.kill()
    attached.wait()


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


def test_ray_still_calls_what_is_wrapped(monkeypatch):
    """The name in Ray's compiled worker and in its Python part."""
    from ray.util import pdb, rpdb

    calls = []
    monkeypatch.setattr(rpdb, "_post_mortem", lambda: calls.append(1))
    monkeypatch.setenv(post_mortem.VARIABLE, "1")
    assert pdb is rpdb and pdb._is_ray_debugger_post_mortem_enabled()
    post_mortem.install_debugger((KeyError,))
    for error in (KeyError("handled"), ValueError("not")):
        try:
            raise error
        except Exception:
            pdb._post_mortem()
    assert calls == [1]
