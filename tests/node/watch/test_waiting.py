"""A run whose reward server stands still or answers 503: it waits, says for what, is no hang, and goes on."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import servers
from tests.loops.jobs import Job
from tests.node.watch.test_watchdog import run_with
from tests.node.watch.test_watchdog import watched as watched_run
from trainer import config as c
from trainer.config.run_folder import read_lines
from trainer.loops.process import explain_error
from trainer.node.watch import watchdog
from trainer.node.watch.watchdog import Watchdog
from trainer.observe.node_monitor import NodeMonitor
from trainer.observe.phases import Phases
from trainer.rewards import remote
from trainer.rewards.grade import ServerAway
from trainer.rewards.remote import RewardClient
from trainer.system import server_waits
from trainer.system.backoff import Backoff
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_STORAGE

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        count = len(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"])
        body = json.dumps({"rewards": [1.0] * count}).encode()
        self.send_response(int(sys.argv[2]))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@contextmanager
def server(port: int, status: int = 200):
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port), str(status)])
    try:
        servers.wait_for_port(port, process)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def port(free_port):
    return free_port


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A watchdog whose phases hang after 0.3 s, and what it says while `grade` runs in the background."""
    monkeypatch.setenv(server_waits.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(watchdog, "LOOK_S", 0.0)
    monkeypatch.setattr(
        remote, "TRIES", Backoff(attempts=2, first_wait_s=0.05, max_wait_s=0.1, patience_s=20)
    )
    run = c.RunConfig(run=c.Run(dir=str(tmp_path)), watch=c.Watch(first_s=0.3, floor_s=0.3))
    dog = Watchdog(run)
    monitor = NodeMonitor(0, tmp_path, tmp_path)
    phases = Phases(tmp_path)
    phases.begin(1, 9)

    def watch(client: RewardClient, meanwhile) -> tuple[list, list[str]]:
        graded: list = []
        said: list[str] = []

        def grade() -> None:
            try:
                graded.extend(client.grade(["a"], ["b"], ["text"], ["q"]))
            except Exception as error:
                graded.append(error)

        with phases("grade"):
            thread = threading.Thread(target=grade)
            thread.start()
            began = time.monotonic()
            while thread.is_alive():
                said += dog.look(monitor.sample())
                assert dog.overdue() == "", "a wait for a server is no hang"
                meanwhile(time.monotonic() - began)
                time.sleep(0.05)
        said += dog.look(monitor.sample())
        return graded, said

    return watch


def client(port: int) -> RewardClient:
    one = RewardClient(c.Rewards(remote_url=f"http://127.0.0.1:{port}/get_reward"))
    one.timeout_s = 20.0
    return one


def test_a_server_that_stands_still_is_waited_for_by_name_and_the_run_goes_on(watched, port, monkeypatch):
    monkeypatch.setattr(server_waits, "TELL_S", 0.4)
    with server(port) as process:
        os.kill(process.pid, signal.SIGSTOP)

        def meanwhile(seconds: float) -> None:
            if seconds > 1.0:
                os.kill(process.pid, signal.SIGCONT)

        graded, said = watched(client(port), meanwhile)
    assert [grade.verdict for grade in graded] == ["correct"]
    first, last = said
    assert first.startswith(f"waiting for the reward server at http://127.0.0.1:{port}/get_reward since ")
    assert last == f"the wait for the reward server at http://127.0.0.1:{port}/get_reward is over"


def test_a_server_that_answers_503_and_is_then_replaced(watched, port):
    stack = [server(port, 503), server(port)]
    first = stack.pop(0)
    first.__enter__()
    replaced = []

    def meanwhile(seconds: float) -> None:
        if seconds > 0.8 and not replaced:
            first.__exit__(None, None, None)
            replaced.append(stack.pop(0))
            replaced[0].__enter__()

    try:
        graded, said = watched(client(port), meanwhile)
    finally:
        for one in replaced:
            one.__exit__(None, None, None)
    assert [grade.verdict for grade in graded] == ["correct"]
    assert "answers 503" in said[0] and said[-1].endswith("is over")


def test_a_server_that_stays_away_is_named_and_no_rank_is(watched, port, monkeypatch):
    monkeypatch.setattr(remote, "TRIES", Backoff(attempts=2, first_wait_s=0.05, max_wait_s=0.1, patience_s=1))
    (error,), said = watched(client(port), lambda seconds: None)
    assert isinstance(error, ServerAway) and "Connection refused" in said[0]
    code, text = explain_error(error)
    assert code == EXIT_STORAGE
    assert text.startswith(
        f"error: rewards.remote_url http://127.0.0.1:{port}/get_reward has answered nothing for 1 s"
    )
    assert "rank" not in text and "\n" not in text


def test_the_client_is_patient_for_half_an_hour():
    assert remote.TRIES.patience_s == 1800


def test_a_wait_ends_with_its_process_and_its_limit(tmp_path, monkeypatch):
    monkeypatch.setenv(server_waits.FOLDER_VARIABLE, str(tmp_path))
    with server_waits.waiting_for("storing", "the store", 0.2):
        assert [wait.what for wait in server_waits.read_waits(tmp_path)] == ["the store"]
        time.sleep(0.3)
        assert server_waits.read_waits(tmp_path) == [], "from here on a hang is a hang"
    with server_waits.waiting_for("grading", "the judge", 60):
        mine = tmp_path / f"waits-{os.getpid()}.json"
        gone = subprocess.Popen(["true"])
        gone.wait()
        mine.rename(tmp_path / f"waits-{gone.pid}.json")
        (tmp_path / f"waits-{os.getpid()}.json").write_text("[1, {}]")
        assert server_waits.read_waits(tmp_path) == []


@pytest.mark.parametrize(("kind", "phase", "hangs"), [
    ("grading", "grade", False), ("grading", "eval", False), ("grading", "update", True),
    ("storing", "checkpoint", False), ("storing", "resume", False), ("storing", "update", True),
    ("storing", "grade", True),
])  # fmt: skip
def test_a_wait_is_progress_of_the_phases_that_wait_for_it_alone(
    tmp_path: Path, monkeypatch, kind, phase, hangs
):
    """An upload beside the learning says nothing of the learning."""
    monkeypatch.setattr(watchdog, "LOOK_S", 0.0)
    dog = Watchdog(c.RunConfig(run=c.Run(dir=str(tmp_path)), watch=c.Watch(first_s=0.1)))
    phases = Phases(tmp_path)
    phases.begin(1, 9)
    sample = NodeMonitor(0, tmp_path, tmp_path).sample()
    with phases(phase):
        time.sleep(0.15)
        dog.look(sample | {"bytes_per_s": {}, "waits": [{"kind": kind, "what": "it", "tell": ""}]})
        assert bool(dog.overdue()) == hangs


@pytest.mark.long
def test_a_run_outlasts_a_reward_server_that_stands_still_for_three_of_its_limits(small_config, port):
    """The launcher, real ranks and a real server, which is stopped while the run is at step 3 or later."""
    with tempfile.TemporaryDirectory(prefix="wait-", dir="/tmp") as made, server(port) as process:
        folder = Path(made)
        rewards = c.Rewards(remote_url=f"http://127.0.0.1:{port}/get_reward")
        config = dataclasses.replace(watched_run(small_config, steps=40), rewards=rewards)
        stopped = threading.Thread(target=_stop_for, args=(process.pid, folder / "run", 45.0), daemon=True)
        stopped.start()
        code, text = run_with("none", config, folder, 580.0)
    assert code == 0, text
    where = f"the reward server at http://127.0.0.1:{port}/get_reward"
    assert f"waiting for {where} since " in text and f"the wait for {where} is over" in text
    assert "no progress" not in text and not stopped.is_alive()


@pytest.mark.long
def test_a_run_whose_graders_fail_ends_in_its_first_step_by_name(small_config, tmp_path):
    """The function passes the call on the first row, and raises on what the model samples."""
    (tmp_path / "mine.py").write_text(
        "def reward(text, reference):\n    return 1.0 if 'A thought' in text else text.no_such()\n"
    )
    path = f"{tmp_path}/mine.py:reward"
    config = dataclasses.replace(small_config, rewards=c.Rewards(function=path, workers=1))
    job = Job(config, tmp_path / "job").start()
    try:
        assert job.wait() == EXIT_CONFIG, job.tail()
        (line,) = [line for line in job.tail().splitlines() if line.startswith("error: ")]
    finally:
        job.kill()
    assert "could not be graded, more than rewards.max_error_rate 0.2: rewards.function" in line
    assert f"{path}: AttributeError: 'str' object has no attribute 'no_such' (mine.py:2)" in line


def _stop_for(pid: int, run_dir: Path, seconds: float) -> None:
    deadline = time.monotonic() + 400
    while len(read_lines(run_dir / "metrics.jsonl")) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)
