"""The node launcher of one node on this machine, with a small Ray job. Several hosts: tests/lab."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from trainer import config as c
from trainer.node import __main__ as node_command
from trainer.node.launch import launcher

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tmp_path():
    """A short path: the names of Ray's sockets may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="node-", dir="/tmp") as folder:
        yield Path(folder)


def launch(
    tmp_path: Path, *command: str, run=("-m", "trainer.node"), device="cpu", hours=24.0, **env: str
) -> subprocess.Popen[str]:
    config = c.RunConfig(
        run=c.Run(name="one", dir=str(tmp_path / "run")),
        model=c.Model(path=str(tmp_path)),
        data=c.Data(path=str(tmp_path)),
        checkpoint=c.Checkpoint(max_hours=hours),
        placement=c.Placement(device=device, workers_per_node=2),
    )
    (tmp_path / "run.yaml").write_text(c.dump(config))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTRL_", "SLURM_", "RAY_"))}
    clean |= {"SPOTRL_TMP": str(tmp_path), "SPOTRL_METADATA": "off"} | env
    arguments = ["--config", str(tmp_path / "run.yaml"), *(["--", *command] if command else [])]
    streams = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        [sys.executable, *run, *arguments], cwd=ROOT, env=clean, start_new_session=True, **streams
    )


def python(tmp_path: Path, code: str, **more) -> subprocess.Popen[str]:
    """A launch whose job is Python code."""
    return launch(tmp_path, sys.executable, "-c", code, **more)


def ended(tmp_path: Path, process: subprocess.Popen[str], code: int, timeout_s: float = 120) -> str:
    """What a launch has printed that leaves with a code, and nothing behind it."""
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == code, output
    assert leftovers(tmp_path) == []
    return output


def leftovers(tmp_path: Path) -> list[str]:
    """Command lines of processes that this launch left behind: all carry its folder in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.environ().get("SPOTRL_TMP") == str(tmp_path)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:200])
    return found


def until_line(process: subprocess.Popen[str], text: str, timeout_s: float = 120.0) -> list[str]:
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    lines: list[str] = []
    assert process.stdout
    for line in process.stdout:
        lines.append(line)
        if text in line:
            timer.cancel()
            return lines
    raise AssertionError("".join(lines))


SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(33))
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
print("working", flush=True)
time.sleep(300)
"""
RESOURCES = """
import os, ray
from pathlib import Path
ray.init(logging_level="ERROR")
has = ray.cluster_resources()
token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
print("open for others:", token.stat().st_mode & 0o077 | token.parent.stat().st_mode & 0o077)
print(int(has["CPU"]), has.get("GPU"), flush=True)
os._exit(35)
"""


def test_a_launch_leaves_with_the_jobs_code_and_leaves_nothing(tmp_path):
    """No other user of the machine reaches the token or Ray's files: `ray start` opens its own folder to
    all."""
    lines = ended(tmp_path, python(tmp_path, RESOURCES), 35).splitlines()
    assert "2 None" in lines and "open for others: 0" in lines
    assert (tmp_path / "run" / "launch.log").read_text().splitlines()[-1] == "2 None"


TAKEN_MEANWHILE = """
import runpy, socket
from dataclasses import replace
from trainer.node.launch.ray_node import Ports
taken = socket.create_server(("", 0))
choose, turns = Ports.choose, []
def chosen(alone):
    turns.append(alone)
    return replace(choose(alone), **({"TAKEN": taken.getsockname()[1]} if len(turns) == 1 else {}))
Ports.choose = chosen
runpy.run_module("trainer.node", run_name="__main__", alter_sys=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("port", ["gcs", "dashboard"])
def test_a_port_that_is_taken_after_it_was_chosen_costs_one_more_start(tmp_path, port):
    taken = ("-c", TAKEN_MEANWHILE.replace("TAKEN", port))
    output = ended(tmp_path, python(tmp_path, RESOURCES, run=taken), 35, 180)
    assert output.count("again, on other ports") == 1


def test_ctrl_c_reaches_the_job_and_leaves_nothing(tmp_path):
    process = python(tmp_path, SLEEPER)
    until_line(process, "working")
    process.send_signal(signal.SIGINT)
    ended(tmp_path, process, 130, 30)


@pytest.mark.slow
def test_a_killed_launcher_takes_everything_with_it(tmp_path):
    process = python(tmp_path, SLEEPER)
    until_line(process, "working")
    process.kill()
    process.wait(5)
    deadline = time.monotonic() + 30
    while left := leftovers(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.long
def test_a_job_that_outlasts_the_notice_is_ended(tmp_path):
    stubborn = SLEEPER.replace("sys.exit(33)", "None")
    process = python(tmp_path, stubborn, SPOTRL_NOTICE_S="3")
    until_line(process, "working")
    process.send_signal(signal.SIGTERM)
    ended(tmp_path, process, 33, 30)


def test_a_launcher_starts_without_the_training_stack():
    code = (
        "import sys, trainer.node.__main__; print([m for m in ('torch', 'ray', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_a_missing_configuration_is_one_line(tmp_path):
    command = [sys.executable, "-m", "trainer.node", "--config", str(tmp_path / "no.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == f"error: no configuration at {tmp_path / 'no.yaml'}\n"


def test_another_number_of_nodes_than_asked_for_is_refused(tmp_path):
    process = launch(tmp_path, SPOTRL_PEERS="10.0.0.1,10.0.0.2", SPOTRL_NODE_RANK="0")
    output = ended(tmp_path, process, 2, 30)
    assert output == "error: placement.nodes is 1, and spotrl started 2: make them equal\n"


def test_a_machine_that_fails_its_checks_is_counted_until_the_run_ends(tmp_path):
    """A platform that restarts after 36 and gets this machine, which has lost its GPUs, again and again."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = {"SPOTRL_NODES": "1", "SPOTRL_GPUS_PER_NODE": "2", "SPOTRL_LAUNCH": "one"}
    env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    left = []
    for _ in range(4):
        process = launch(tmp_path, device="cuda", **env)
        output, _ = process.communicate(timeout=120)
        left.append(process.returncode)
    assert left == [36, 36, 38, 38], output
    assert "has failed its checks 3 times" in output and "resume" in output
    assert len((tmp_path / "run/refused").read_text().split()) == 4


@pytest.mark.slow
@pytest.mark.parametrize("part", [pytest.param("gcs_server", marks=pytest.mark.long), "raylet"])
def test_a_node_that_lost_ray_says_so(tmp_path, part):
    """Its end shows first as a broken connection here or there, which is not the object store."""
    process = python(tmp_path, SLEEPER)
    until_line(process, "working")
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # Ray's start leaves processes that end by themselves
            if child.name() == part:
                child.kill()
    assert "error: Ray ended on" in ended(tmp_path, process, 34, 60)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 34, "a connection within the launch broke"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), 34, "a connection within the launch broke"),
        (OSError(errno.ENOSPC, "No space left on device"), 35, "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "/run"), 1, "PermissionError"),
    ],
)
def test_only_the_store_is_away_with_35(tmp_path, monkeypatch, error, code, said, capsys):
    """Errors of the system in the launcher itself, of one that takes no attempt."""

    def fails(self):
        raise error

    config = c.RunConfig(run=c.Run(name="one", dir=str(tmp_path / "run")))
    (tmp_path / "run.yaml").write_text(c.dump(config))
    monkeypatch.setattr(node_command.HeadLauncher, "run", fails)
    monkeypatch.setattr(node_command, "raise_file_limit", lambda: None)
    monkeypatch.setattr(node_command, "adopt_orphans", lambda: None)
    monkeypatch.setattr(node_command, "signals_of_a_launch", lambda: None)
    # A launcher ends all descendants of its process, which here are those of other tests.
    monkeypatch.setattr(launcher, "end_descendants", lambda: None)
    assert node_command.main(["--config", str(tmp_path / "run.yaml"), "--preflight"]) == code
    assert said in capsys.readouterr().err


@pytest.mark.long
def test_the_head_ends_a_run_whose_hours_are_over_for_good(tmp_path):
    """It has the job save first: the notice reaches it with the seconds that are left."""
    job = (
        "from trainer.node.watch.preemption import PreemptionNotice; import sys, time\n"
        "notice = PreemptionNotice()\nwhile not notice.poll(): time.sleep(0.1)\n"
        "print('left', round(notice.remaining_s()), flush=True); sys.exit(33)"
    )
    output = ended(tmp_path, python(tmp_path, job, hours=1 / 40, SPOTRL_NODES="1"), 38)
    assert "all attempts together have taken the 0.025 hours of budget.max_hours" in output
    assert "left 9" in output or "left 8" in output
    final = json.loads((tmp_path / "run" / "attempts" / "final.json").read_text())
    assert (final["code"], "budget.max_hours" in final["why"]) == (38, True)
