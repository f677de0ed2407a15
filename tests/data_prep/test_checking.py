"""Decoding processes may die, by a picture or from outside; each picture is judged all the same, and quickly."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.ingest import checking
from data_prep.ingest.images import ImageLimits
from tests.data_prep.raw import picture

BATCHES, EACH = 30, 4
FATAL = b"this one takes its decoder down"


def check(pack, places, limits, fast_png=False):
    """As the real one, but a certain picture kills the process, as a fault in a C decoder would."""
    with open(pack, "rb") as file:
        for offset, size in places:
            file.seek(offset)
            if file.read(size) == FATAL:
                os.kill(os.getpid(), signal.SIGKILL)
    return checking.check(pack, places, limits, fast_png)


@pytest.fixture
def checks(tmp_path, monkeypatch):
    """`start(pictures)` gives a Checks that has them all queued, and the list of the pools that it made."""
    pools, opened = [], []
    make = checking.Checks._new_pool
    monkeypatch.setattr(checking.Checks, "_new_pool", lambda self, n: pools.append(make(self, n)) or pools[-1])

    def start(pictures):
        places, end = [], 0
        for data in pictures:
            places.append((end, len(data)))
            end += len(data)
        (tmp_path / "pack").write_bytes(b"".join(pictures))
        opened.append(checking.Checks(tmp_path / "pack", ImageLimits(), 2, 0))
        for i in range(0, len(places), EACH):
            opened[0].submit(places[i : i + EACH])
        return opened[0], pools

    yield start
    opened[0].close()


def test_batches_come_back_in_order_and_empty_ones_too(checks):
    pictures = [picture(i, width=100 + i) for i in range(9)]
    running, _ = checks(pictures)
    running.submit([])
    assert [one.width for _ in range(3) for one in running.take()] == [100 + i for i in range(9)]
    assert running.ready and running.take() == [] and not len(running)


def test_a_worker_killed_from_outside_costs_nothing(checks):
    running, pools = checks([picture(0)] * (BATCHES * EACH))
    facts = running.take()
    end = time.monotonic() + 60
    while not running._pool._processes and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(next(iter(running._pool._processes)), signal.SIGKILL)
    facts += [one for _ in range(BATCHES - 1) for one in running.take()]
    assert len(facts) == BATCHES * EACH and all(one.error == "" for one in facts)
    assert len(pools) <= 3, "those that waited behind the lost batch are submitted together"


def test_a_picture_that_kills_its_decoder_is_found_alone(checks, monkeypatch):
    pictures = [picture(0)] * (BATCHES * EACH)
    fatal = {17, 18, 90}
    for i in fatal:
        pictures[i] = FATAL
    monkeypatch.setattr(checking, "check", check)
    running, pools = checks(pictures)
    facts = [one for _ in range(BATCHES) for one in running.take()]
    assert {i for i, one in enumerate(facts) if one.error.startswith("image_crashed")} == fatal
    assert all(one.error == "" for i, one in enumerate(facts) if i not in fatal)
    assert len(pools) < BATCHES, "a crash must not cost a pool for every batch that waits"


def test_ctrl_c_while_the_workers_load_is_the_callers_alone():
    """A terminal sends it to all processes; only the command itself has something to say."""
    script = """
import os, signal, time
from data_prep.ingest import checking
try:
    checking.warm_up(checking.FAST_PNG_BYTES)
    time.sleep(0.15)
    os.killpg(0, signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    print("stopped")
"""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert done.stdout == "stopped\n" and done.stderr == ""
