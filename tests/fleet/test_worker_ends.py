"""When a worker ends, so that no machine outlives its run: the worker's own loop, with a function for an
engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.fleet.jobs import about_run
from tests.fleet.test_verify import EXPECTED, UNIT, good
from trainer.checkpoint.attempt import Attempts
from trainer.config import ConfigError
from trainer.fleet import head_thread, roster, run_follower, worker, worker_heartbeat
from trainer.fleet.dispatch import Dispatcher
from trainer.fleet.engine_ranks import check_layout
from trainer.fleet.objects import Objects, about_key, head_key
from trainer.fleet.run_follower import RunFollower
from trainer.fleet.worker import Worker
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage
from trainer.system.exit_codes import EXIT_ERROR, EXIT_OK

KEY = "0123456789abcdef"


class PlayedEngine:
    """Samples the unit of `test_verify`."""

    followed = 0
    out_of_step = False

    def __init__(self) -> None:
        self.there = threading.Event()
        """Unset while the weights are on their way."""
        self.there.set()
        self.took: list[tuple[int, str]] = []

    def take_weights(self, seen: Any) -> None:
        self.took.append((seen.version, seen.lineage))
        self.there.wait(10.0)

    def follow(self, layout: Any) -> None:
        self.followed += 1

    def sample(self, unit: Any, seen: Any) -> tuple[list[Any], float]:
        return good(), 0.1


class Run:
    """A run's folder in a bucket, its attempts, and a worker that serves it in a thread."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "w0") -> None:
        monkeypatch.setenv("SPOTRL_FLEET_KEY", KEY)
        monkeypatch.setattr(roster, "LIST_S", 0.02)
        monkeypatch.setattr(head_thread, "HEARTBEAT_S", 0.1)
        monkeypatch.setattr(run_follower, "NEWER_S", 0.05)
        self.root = str(folder / "run")
        seal = Seal("run", KEY.encode())
        self.attempts = Attempts(Storage(f"{self.root}/attempts"), seal=seal)
        self.objects = Objects(Storage(f"{self.root}/fleet"), seal)
        self.engine = PlayedEngine()
        self.worker = Worker(self.root, name, (), idle_s=1.0, poll_s=0.02)
        self.code: int | None = None
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def head(self, launch: str = "") -> Dispatcher:
        """The head of a new attempt; its thread has begun."""
        held = self.attempts.take(0, launch)
        one = Dispatcher(self.objects, held, EXPECTED, lost_s=30.0, wait_s=30.0, poll_s=0.02)
        self.objects.put_record(about_key(held.name), about_run(held.name))
        one.announce(version=6, lineage=UNIT.lineage)
        one.start()
        return one

    def serve(self) -> None:
        """Starts the worker."""
        self.thread.start()

    def _serve(self) -> None:
        about = self.worker._wait_for_run()
        if about is None:
            self.code = EXIT_OK
            return
        self.worker.heartbeat.begin(self.worker.attempt, "cpu")
        self.code = self.worker._begin(self.engine, 0.0)  # ty: ignore[invalid-argument-type]

    def fetching(self, times: int = 1) -> None:
        """Waits until the worker has begun to fetch weights so often."""
        while len(self.engine.took) < times:
            assert self.thread.is_alive(), self.worker.why
            time.sleep(0.01)

    def ended(self) -> str:
        """Waits for the worker's end; what its last mark says of it."""
        self.thread.join(10.0)
        assert not self.thread.is_alive() and self.code == EXIT_OK
        newest = worker_heartbeat.read_heartbeat(self.objects, "w0")
        return newest.goodbye if newest else self.worker.why


@pytest.fixture
def run(tmp_path, monkeypatch):
    return Run(tmp_path, monkeypatch)


def sampled(head: Dispatcher) -> bool:
    head.add_units([UNIT])
    return len(head.wait_for(UNIT)) == 4


@pytest.mark.parametrize("served", [True, False], ids=["it sampled", "it came later"])
@pytest.mark.parametrize("how", ["over", "no step is left"])
def test_it_ends_when_its_run_is_over(run, served, how):
    """Without a step left, the attempt before was killed after its last commit, and before it could say that
    the run is over."""
    head = run.head()
    if served:
        run.serve()
        assert sampled(head)
    if how != "over":
        head._thread.stop()
        head = Dispatcher(run.objects, run.attempts.take(9, ""), EXPECTED, lost_s=30.0, wait_s=30.0)
    head.close("over", how)
    if not served:
        run.serve()
    assert run.ended() == how
    if how == "over" and not served:
        assert worker_heartbeat.read_heartbeat(run.objects, "w0") is None, "it was about to load an engine"


def test_it_waits_for_the_next_attempt_and_ends_when_none_comes(run):
    first = run.head()
    run.serve()
    assert sampled(first)
    first.close("away", "this attempt of the trainer has ended")
    second = run.head()
    assert sampled(second) and run.engine.followed == 1
    second.close("away", "this attempt of the trainer has ended")
    begun = time.monotonic()
    assert run.ended() == "the trainer was silent for 1 s (fleet.idle_s)"
    assert 0.8 < time.monotonic() - begun < 5


def test_it_ends_when_no_trainer_comes(run):
    run.serve()
    assert run.ended() == f"no trainer of {run.root} within 1 s"


def test_no_trainer_waits_for_a_worker_whose_weights_are_on_their_way(run):
    """Neither the first nor the next: it is seen to be on its way, and gets nothing before it has them."""
    first = run.head()
    run.engine.there.clear()
    run.serve()
    first.add_units([UNIT])
    run.fetching()
    time.sleep(0.3)
    assert run.engine.took == [(6, UNIT.lineage)] and not first.probing()
    assert [(row["state"], row["lives"]) for row in first.rows()] == [("fetching", True)]
    run.engine.there.set()
    assert len(first.wait_for(UNIT)) == 4
    first.close("away", "this attempt of the trainer has ended")
    run.engine.there.clear()
    second = run.head()
    second.add_units([UNIT])
    run.fetching(2)
    time.sleep(0.3)
    assert [row["state"] for row in second.rows()] == ["fetching"]
    run.engine.there.set()
    assert len(second.wait_for(UNIT)) == 4 and run.engine.followed == 1, "and takes the new layout"
    second.close("over", "the run has reached its last step")
    run.ended()


def test_a_trainer_waits_for_a_worker_that_fetches_for_longer_than_its_patience(run, monkeypatch):
    """And the worker does not take what it did not hear meanwhile for the trainer's silence."""
    monkeypatch.setattr(worker_heartbeat, "HEARTBEAT_S", 0.1)
    head = run.head()
    head.wait_s = 1.5
    run.worker.idle_s = 1.5
    run.engine.there.clear()
    run.serve()
    run.fetching()
    threading.Timer(4.0, run.engine.there.set).start()
    assert sampled(head)
    head.close("over", "the run has reached its last step")
    assert run.ended() == "the run has reached its last step"


def test_a_worker_whose_weights_do_not_come_asks_again_with_its_first_unit(run, capsys):
    def missing(seen: Any) -> None:
        raise FileNotFoundError("weights/00000006.json: not in the bucket")

    run.engine.take_weights = missing
    head = run.head()
    run.serve()
    assert sampled(head)
    assert "weights/00000006.json: not in the bucket" in capsys.readouterr().out
    head.close("over", "the run has reached its last step")
    run.ended()


def test_a_run_that_gave_up_has_no_workers_until_it_is_launched_again(run, tmp_path, monkeypatch):
    """Nothing takes the mark of the end away, so it says whose end it is."""
    head = run.head("monday")
    run.serve()
    assert sampled(head)
    run.attempts.finish(41, "4 attempts failed with no new checkpoint", "monday")
    assert run.ended() == "4 attempts failed with no new checkpoint"
    head.close("away", "this attempt of the trainer has ended")

    again = Run(tmp_path, monkeypatch, "w1")
    head = again.head("tuesday")
    again.serve()
    assert json.loads(again.attempts.storage.get_bytes("final.json"))["launch"] == "monday"
    assert sampled(head)
    head.close("over", "the run has reached its last step")
    again.thread.join(10.0)
    assert again.code == EXIT_OK


def test_a_worker_with_another_run_s_key_says_so_at_once_and_for_good(run, monkeypatch):
    run.head()
    monkeypatch.setenv("SPOTRL_FLEET_KEY", "f" * 32)
    stranger = Worker(run.root, "w9", (), idle_s=900.0, poll_s=0.02)
    with pytest.raises(ConfigError, match="SPOTRL_FLEET_KEY is that of another run"):
        stranger._wait_for_run()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(lambda run, key: b"a stranger's bytes, without the run's key", id="not signed"),
        pytest.param(lambda run, key: signed(run, key, b'{"layout": 3}'), id="of other types"),
        pytest.param(lambda run, key: signed(run, key, b"no JSON"), id="no JSON"),
    ],
)
def test_forged_words_of_a_head_end_no_worker(run, content):
    """Whoever may write to the bucket: the worker passes over what it cannot believe, and waits."""
    head = run.head()
    head.close("away", "nothing of it changes from now on")
    follower = RunFollower(run.objects, run.worker.following.record, "w0")
    storage = run.objects.storage
    names = [about_key(head.attempt.name), head_key(head.attempt.name)]
    written = {name: storage.get_bytes(name) for name in names}
    for name in names:
        storage.put_bytes(name, content(run, name))
    for _ in range(3):
        assert follower.newest() == "" and follower.look() is None
    for name, data in written.items():
        storage.put_bytes(name, data)
    assert follower.newest() == head.attempt.name
    assert follower.about() is not None and follower.look() is not None


def signed(run: Run, key: str, body: bytes) -> bytes:
    return run.objects.seal.signature(f"fleet/{key}", body) + body


def test_a_second_worker_of_a_name_ends_while_the_first_lives(run, monkeypatch):
    monkeypatch.setattr(worker_heartbeat, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(worker, "SAME_NAME_S", 0.5)
    head = run.head()
    run.serve()
    assert sampled(head)
    second = Worker(run.root, "w0", (), idle_s=1.0, poll_s=0.02)
    with pytest.raises(ConfigError, match=f"a worker called w0 is alive on {socket.gethostname()}"):
        second._check_name()
    head.close("over", "the run has reached its last step")
    run.ended()
    second._check_name()  # it has said goodbye


def test_the_mark_of_a_worker_that_was_killed_holds_nobody_up(run, monkeypatch):
    monkeypatch.setattr(worker, "SAME_NAME_S", 0.2)
    killed = worker_heartbeat.WorkerHeartbeat(run.objects, "w0")
    killed.write(attempt="1-a", state="sampling")
    run.worker._check_name()


def test_another_model_than_the_trainer_s_is_refused_by_name():
    layout = [[("embed", 0, 8)], [("embed", 8, 16)]]
    check_layout(layout, {"embed": torch.zeros(4, 4)}, "mine")
    for tensors in ({"embed": torch.zeros(3, 4)}, {"other": torch.zeros(4, 4)}):
        with pytest.raises(ConfigError, match="model.path mine is another model"):
            check_layout(layout, tensors, "mine")


ENDING = """
import sys
import threading
from trainer.fleet import worker

class Engine:
    def __del__(self):
        threading.Event().wait()

def wait(why):
    threading.Event().wait()

class Ending(worker.Worker):
    def _wait_for_run(self):
        return {}

    def _serve(self, about):
        {body}
        return self._ended("over")

worker.Worker, worker.END_S = Ending, 1.0
worker.main()
"""


@pytest.mark.parametrize(
    ("body", "code"),
    [("self._engine = Engine()", EXIT_OK), ("self.heartbeat.goodbye = wait", EXIT_ERROR)],
    ids=["an engine that is never taken down", "a last word that never ends"],
)
def test_its_process_ends_in_time(tmp_path, body, code):
    command = [
        sys.executable,
        "-c",
        ENDING.replace("{body}", body),
        "--run",
        f"{tmp_path}/run",
        "--name",
        "w0",
    ]
    own = {"SPOTRL_FLEET_KEY": KEY, "SPOTRL_METADATA": "off"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, timeout=120
    )
    assert "worker w0: ends: over" in done.stdout
    assert done.returncode == code, done.stderr
    assert ("in wait" in done.stderr) == (code == EXIT_ERROR)  # where it waited
