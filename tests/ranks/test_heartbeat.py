"""A rank that vanishes is named by every other one, in one line, whatever these wait for."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trainer.ranks.heartbeat import ENDED, Heartbeat
from trainer.ranks.torchrun import is_collective
from trainer.system.exit_codes import EXIT_NODE_LOST

ROOT = Path(__file__).parents[2]
STORE = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, True, wait_for_workers=False)
time.sleep(600)
"""
RANK = """
import sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from trainer.ranks.heartbeat import Heartbeat
rank, port, does = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), False)
beating = Heartbeat(store, rank, ["a", "b", "c"], silent_s=2.0, beat_s=0.2).start()
print("beats", flush=True)
time.sleep(1.0)
if does == "ends":
    beating.stop()
elif does == "fails":
    time.sleep(1.0)  # after the one that ends well
    beating.failed("ValueError: no such row")
else:
    time.sleep(60)  # as in a collective
"""


@pytest.fixture
def start(free_port):
    store = subprocess.Popen([sys.executable, "-c", STORE, str(free_port)])
    started = [store]

    def ranks(*does):
        for rank, one in enumerate(does):
            words = [sys.executable, "-c", RANK, str(rank), str(free_port), one]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(words, cwd=ROOT, **pipes))
        for process in started[1:]:
            assert process.stdout.readline() == "beats\n"
        return started[1:]

    ranks.store = store
    yield ranks
    for process in started:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def said(process):
    assert process.wait(60) == EXIT_NODE_LOST
    (line,) = process.stderr.read().splitlines()
    return line.removeprefix("error: a worker or node was lost: ")


class SlowStore:
    """A store where a beat takes until it may go on."""

    def __init__(self):
        self.values = {}
        self.entered, self.goes_on = threading.Event(), threading.Event()

    def set(self, key, value):
        if value == b"1":
            self.entered.set()
            assert self.goes_on.wait(10)
        self.values[key] = value

    def check(self, keys):
        return False


def test_a_beat_under_way_does_not_overwrite_that_a_rank_has_ended():
    store = SlowStore()
    beating = Heartbeat(store, 0, ["a"], silent_s=10.0, beat_s=0.01).start()
    assert store.entered.wait(10)
    ending = threading.Thread(target=beating.stop)
    ending.start()
    ending.join(0.2)
    store.goes_on.set()
    ending.join(10)
    time.sleep(0.2)
    assert store.values == {"alive/0": ENDED}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_who_vanishes_is_named_on_all_others(start, how):
    first, second, third = start("waits", "waits", "waits")
    began = time.monotonic()
    second.send_signal(how)
    assert said(first) == said(third) == "rank 1 on b has said nothing for 2 s"
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_who_fails_says_why_and_who_ends_well_is_not_lost(start):
    first, second, third = start("waits", "ends", "fails")
    assert second.wait(60) == 0
    assert said(first) == "rank 2 on c failed: ValueError: no such row"
    third.wait(60)


@pytest.mark.slow
def test_the_host_of_the_store_is_named(start):
    first, second, _ = start("waits", "waits", "waits")
    start.store.send_signal(signal.SIGSTOP)  # nothing is refused and nothing answers, as without a cable
    for process in (first, second):
        assert said(process).startswith("rank 0's host, ")


def test_what_another_rank_s_death_looks_like():
    assert is_collective(
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:3")
    )
    assert not is_collective(ValueError("no such row"))
