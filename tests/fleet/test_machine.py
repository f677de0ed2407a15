"""The workers of a rented machine: started again within a budget, and never there longer than their run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Literal

import pytest

from tests.fleet.jobs import about_run
from tests.loops.jobs import ROOT
from tests.waiting import until
from trainer.checkpoint.attempt import LAUNCH_VARIABLE, Attempts
from trainer.config import ConfigError, Fleet, RunConfig, override
from trainer.fleet import machine
from trainer.fleet.fleet_records import HeadRecord
from trainer.fleet.machine import RunOver, WorkerOnMachine, start_workers, tend_workers
from trainer.fleet.objects import Objects, about_key, head_key
from trainer.fleet.run_follower import RunFollower
from trainer.storage.attempt_record import StartRecord
from trainer.storage.seal import KEY_VARIABLE, Seal
from trainer.storage.storage import Storage
from trainer.system.exit_codes import EXIT_PREEMPTED, EXIT_STORAGE
from trainer.system.processes import has_ended

HOURS = 3600.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short pauses, and the process's own signal handlers afterwards."""
    for name, seconds in (("PAUSE_S", 0.01), ("LATE_S", 0.3), ("KILL_S", 0.5)):
        monkeypatch.setattr(machine, name, seconds)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def engine(code: str, restarts: int = 2) -> WorkerOnMachine:
    return WorkerOnMachine([sys.executable, "-c", code], {}, restarts)


def counted(tmp_path, codes: list[int]) -> str:
    """A program that writes a line at each start, and leaves with the next of these codes."""
    return (
        f"import sys; path = {str(tmp_path / 'starts')!r}; open(path, 'a').write('x');"
        f" sys.exit({codes!r}[len(open(path).read()) - 1])"
    )


@pytest.mark.parametrize(
    ("codes", "starts", "left"),
    [
        ([0], 1, 0),
        ([2], 1, 2),
        ([33], 1, EXIT_PREEMPTED),
        ([1, 35, 0], 3, 0),
        ([35, 35, 35, 0], 3, EXIT_STORAGE),
    ],
)
def test_a_worker_that_fails_is_started_again_within_the_budget(tmp_path, codes, starts, left):
    assert tend_workers([engine(counted(tmp_path, codes))], lambda: "", HOURS) == left
    assert len((tmp_path / "starts").read_text()) == starts


def test_a_worker_that_hangs_when_the_run_is_over_is_ended(tmp_path):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    engines = [engine(deaf), engine("import time; time.sleep(300)")]
    assert tend_workers(engines, lambda: "the run is over", HOURS, look_s=0.1) == 0
    assert not any(one.running for one in engines)


def test_a_machine_ends_when_its_hours_are_over():
    hangs = engine("import time; time.sleep(300)")
    began = time.monotonic()
    assert tend_workers([hangs], lambda: "", 0.2, look_s=0.1) == 0
    assert time.monotonic() - began < 10 and not hangs.running


def test_a_notice_reaches_every_worker_and_none_is_started_again():
    tells = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(33)); time.sleep(300)"
    )
    engines = [engine(tells), engine(tells)]
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    assert tend_workers(engines, lambda: "", HOURS) in (EXIT_PREEMPTED, 128 + signal.SIGTERM)
    assert not any(one.running for one in engines)


MACHINE = """
import sys
from trainer.fleet.machine import WorkerOnMachine, tend_workers
worker = WorkerOnMachine([sys.executable, "-c", "import time; time.sleep(300)"], {}, 0)
print(worker.process.pid, flush=True)
tend_workers([worker], lambda: "", 3600.0)
"""


def test_no_worker_outlives_a_machine_s_process_that_is_killed():
    """A platform that starts it again would have two engines on one GPU."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", MACHINE], env=env, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        worker = int(one.stdout.readline())
        one.kill()
    until(lambda: has_ended(worker), 10)


def test_each_gpu_has_a_worker_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code = f"import os; open({str(tmp_path)!r} + '/' + os.environ.get('CUDA_VISIBLE_DEVICES', 'none'), 'w')"
    config = override(RunConfig(), ["placement.workers_per_node=3", "placement.device=cuda"])
    assert tend_workers(start_workers(config, [sys.executable, "-c", code]), lambda: "", HOURS) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    on_cpu = override(config, ["placement.device=cpu", "placement.workers_per_node=1"])
    assert tend_workers(start_workers(on_cpu, [sys.executable, "-c", code]), lambda: "", HOURS) == 0
    assert (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("visible", "ranks", "size", "workers"),
    [
        ("", 8, 4, ["0,1,2,3", "4,5,6,7"]),
        ("", 4, 2, ["0,1", "2,3"]),
        ("5,2,GPU-c,7", 4, 2, ["5,2", "GPU-c,7"]),
        ("", 4, 4, ["none"]),  # an engine of all of them
    ],
)
def test_an_engine_of_several_gpus_has_as_many_of_its_own(
    tmp_path, monkeypatch, visible, ranks, size, workers
):
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    code = f"import os; open({str(tmp_path)!r} + '/' + os.environ.get('CUDA_VISIBLE_DEVICES', 'none'), 'w')"
    sets = [f"placement.workers_per_node={ranks}", f"rollout.tensor_parallel={size}"]
    config = override(RunConfig(), [*sets, "placement.device=cuda"])
    assert tend_workers(start_workers(config, [sys.executable, "-c", code]), lambda: "", HOURS) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == workers


def test_gpus_that_are_left_over_are_refused(monkeypatch):
    config = override(RunConfig(), ["placement.workers_per_node=6", "rollout.tensor_parallel=4"])
    with pytest.raises(ConfigError, match="tensor_parallel 4 does not divide the 6 GPUs .* a divisor of 6"):
        start_workers(config, ["false"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    config = override(config, ["placement.workers_per_node=4", "rollout.tensor_parallel=2"])
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES names 3 GPUs"):
        start_workers(config, ["false"])


# --- whether the run still needs workers ------------------------------------------------------------


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """(what a machine asks, objects that a head writes, the record of attempts)."""
    key = "a secret that is long enough"
    monkeypatch.setenv(KEY_VARIABLE, key)
    monkeypatch.setattr("trainer.fleet.run_follower.NEWER_S", 0.0)
    config = override(RunConfig(fleet=Fleet(run="mine", idle_s=0.5)), [f"checkpoint.remote={tmp_path}"])
    seal = Seal("mine", key.encode())
    objects = Objects(Storage(tmp_path / "mine/fleet"), seal)
    return RunOver(config), objects, Attempts(Storage(tmp_path / "mine/attempts"), seal=seal)


def head(objects: Objects, attempt: str, serial: int, state: Literal["running", "over"] = "running") -> None:
    objects.put_record(about_key(attempt), about_run(attempt))
    record = HeadRecord(attempt=attempt, serial=serial, state=state, why="all is done")
    objects.put_record(head_key(attempt), record)


def attempt(record: Attempts, epoch: int, launch: str) -> str:
    name = f"{epoch}-{launch}"
    record.create(StartRecord(epoch, name, launch, committed=0, host="here", begun_unix_s=0.0))
    return name


def test_a_run_that_is_silent_or_over_needs_none(asked):
    over, objects, record = asked
    name = attempt(record, 1, "a")
    head(objects, name, 1)
    assert over() == ""
    time.sleep(0.6)
    assert "silent for 0 s (fleet.idle_s)" in over()
    head(objects, name, 2)
    assert over() == ""
    head(objects, name, 3, "over")
    assert over() == "the run is over: all is done"


def test_the_launch_that_a_machine_was_started_with_may_be_in_a_queue_for_longer(
    asked, monkeypatch, tmp_path
):
    _, objects, record = asked
    monkeypatch.setenv(LAUNCH_VARIABLE, "new")
    monkeypatch.setattr("trainer.fleet.run_follower.AWAITED_S", 2.0)
    config = override(RunConfig(fleet=Fleet(run="mine", idle_s=0.5)), [f"checkpoint.remote={tmp_path}"])
    over = RunOver(config)
    time.sleep(0.7)
    assert over() == "", "it has not begun"
    name = attempt(record, 1, "new")
    assert over() == "", "from here on its silence counts"
    time.sleep(0.7)
    assert "silent for 0 s" in over()
    head(objects, name, 1)
    assert over() == ""


def test_a_launcher_speaks_for_a_trainer_that_starts_for_a_stated_time(asked):
    """An hour of its marks counts; then `fleet.idle_s` ends the wait. A new attempt begins anew."""
    _, objects, record = asked
    now = 0.0
    following = RunFollower(objects, record, "w", lambda: now)

    def silent_s(at: float, marked: int | None = None, epoch: int = 1) -> float:
        nonlocal now
        now = at
        if marked is not None:
            record.write(f"{epoch:08d}.beat", {"name": f"{epoch}-a", "unix_s": float(marked)})
        following.newest()
        return following.silent_s()

    assert silent_s(600) == 600, "no attempt yet"
    attempt(record, 1, "a")
    assert silent_s(700) == 0 and silent_s(900) == 200, "started by hand it has no launcher"
    assert silent_s(1000, 1) == 0 and silent_s(1100) == 100, "the mark of before says nothing new"
    assert silent_s(1200, 2) == 0 and silent_s(700 + 3590, 3) == 0
    assert silent_s(700 + 3610, 4) == 20 and silent_s(700 + 4500, 5) == 910
    second = attempt(record, 2, "a")
    assert silent_s(5300) == 0 and silent_s(5400, 1, epoch=2) == 0
    head(objects, second, 1)
    assert silent_s(5500, 2, epoch=2) == 100, "from here on its head speaks for itself"
    following.look()
    assert silent_s(5500) == 0


def test_what_an_earlier_launch_came_to_is_not_this_one_s_end(asked, tmp_path, monkeypatch):
    _, objects, record = asked
    attempt(record, 1, "old")
    record.write("final", {"code": 0, "why": "it had all its steps", "launch": "old", "unix_s": 0.0})

    def following() -> RunFollower:
        return RunFollower(objects, record, "w")

    late = following()
    late.newest()
    assert late.over == "it had all its steps", "it was started for nothing"
    monkeypatch.setenv(LAUNCH_VARIABLE, "new")
    early = following()
    early.newest()
    assert early.over == "" and early.attempt == "", "its run has not begun"
    head(objects, attempt(record, 2, "new"), 1)
    assert early.newest() == "2-new" and early.over == ""
    record.write("final", {"code": 2, "why": "no such option", "launch": "new", "unix_s": 0.0})
    early.newest()
    assert early.over == "no such option"

    # `resume` keeps living workers; one that is started again still names the launch before it
    monkeypatch.setenv(LAUNCH_VARIABLE, "new")
    head(objects, attempt(record, 3, "resumed"), 1)
    again = following()
    assert again.newest() == "3-resumed" and again.over == ""


def test_a_worker_that_a_signal_ends_is_not_started_again():
    one = WorkerOnMachine([sys.executable, "-c", "import time; time.sleep(60)"], {}, 3)
    one.stop(signal.SIGTERM)
    one.process.wait(10)
    one.tend()
    assert one.code == -signal.SIGTERM
