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
    return subprocess.Popen(
        [sys.executable, *run, *arguments],
        cwd=ROOT,
        env=clean,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def leftovers(tmp_path: Path) -> list[str]:
    """Command lines of processes that this launch left behind: all carry its folder in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("SPOTRL_TMP") == str(tmp_path)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
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
ray.init(logging_level="ERROR")
has = ray.cluster_resources()
print(int(has["CPU"]), has.get("GPU"), flush=True)
os._exit(35)
"""


def test_a_launch_leaves_with_the_jobs_code_and_leaves_nothing(tmp_path):
    process = launch(tmp_path, sys.executable, "-c", RESOURCES)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 35, output
    assert "2 None" in output.splitlines()
    assert (tmp_path / "run" / "launch.log").read_text().splitlines()[-1] == "2 None"
    assert leftovers(tmp_path) == []


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
    process = launch(
        tmp_path, sys.executable, "-c", RESOURCES, run=("-c", TAKEN_MEANWHILE.replace("TAKEN", port))
    )
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 35, output
    assert output.count("again, on other ports") == 1
    assert leftovers(tmp_path) == []


def test_ctrl_c_reaches_the_job_and_leaves_nothing(tmp_path):
    process = launch(tmp_path, sys.executable, "-c", SLEEPER)
    until_line(process, "working")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_killed_launcher_takes_everything_with_it(tmp_path):
    process = launch(tmp_path, sys.executable, "-c", SLEEPER)
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
    process = launch(tmp_path, sys.executable, "-c", stubborn, SPOTRL_NOTICE_S="3")
    until_line(process, "working")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 33
    assert leftovers(tmp_path) == []


def test_a_launcher_starts_without_the_training_stack():
    code = (
        "import sys, trainer.node.__main__; print([m for m in ('torch', 'ray', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_a_missing_configuration_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "trainer.node", "--config", str(tmp_path / "no.yaml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr == f"error: no configuration at {tmp_path / 'no.yaml'}\n"


def test_another_number_of_nodes_than_asked_for_is_refused(tmp_path):
    process = launch(tmp_path, SPOTRL_PEERS="10.0.0.1,10.0.0.2", SPOTRL_NODE_RANK="0")
    output, _ = process.communicate(timeout=30)
    assert (
        process.returncode == 2
        and output == "error: placement.nodes is 1, and spotrl started 2: make them equal\n"
    )


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
@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_a_node_that_lost_ray_says_so(tmp_path, part):
    """Its end shows first as a broken connection here or there, which is not the object store."""
    process = launch(tmp_path, sys.executable, "-c", SLEEPER)
    until_line(process, "working")
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # Ray's start leaves processes that end by themselves
            if child.name() == part:
                child.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 34, output
    assert "error: Ray ended on" in output, output
    assert leftovers(tmp_path) == []


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
    told = (
        "from trainer.node.watch.preemption import PreemptionNotice; import sys, "
        "time\nnotice = PreemptionNotice()\n"
    )
    told += "while not notice.poll(): time.sleep(0.1)\n"
    told += "print('left', round(notice.remaining_s()), flush=True); sys.exit(33)"
    process = launch(tmp_path, sys.executable, "-c", told, hours=1 / 40, SPOTRL_NODES="1")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 38, output
    assert "all attempts together have taken the 0.025 hours of budget.max_hours" in output
    assert "left 9" in output or "left 8" in output
    final = json.loads((tmp_path / "run" / "attempts" / "final.json").read_text())
    assert (final["code"], "budget.max_hours" in final["why"]) == (38, True)
    assert leftovers(tmp_path) == []
