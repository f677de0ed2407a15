"""Decoding processes may die or hang, by an image or from outside; each image is judged all the same, and
quickly."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from data_prep.ingest import checking
from tests.data_prep.raw import image
from trainer.images.decoding import ImageLimits
from trainer.system.processes import has_ended

ROOT = str(Path(__file__).parents[2])
BATCHES, EACH = 30, 4
FATAL, ENDLESS = b"this one takes its decoder down", b"this one never ends"


def check(pack, places, limits):
    """As the real one, but a certain image kills the process, as a fault in a C decoder would, and one hangs
    it."""
    with open(pack, "rb") as file:
        for offset, size in places:
            file.seek(offset)
            data = file.read(size)
            if data == FATAL:
                os.kill(os.getpid(), signal.SIGKILL)
            if data == ENDLESS:
                time.sleep(1000)
    return checking.check(pack, places, limits)


@pytest.fixture
def checks(tmp_path):
    """`start(images)` gives a Checks that has them all queued."""
    opened = []

    def start(images):
        places, end = [], 0
        for data in images:
            places.append((end, len(data)))
            end += len(data)
        (tmp_path / "pack").write_bytes(b"".join(images))
        opened.append(checking.Checks(tmp_path / "pack", ImageLimits(), 2))
        for i in range(0, len(places), EACH):
            opened[0].submit(places[i : i + EACH])
        return opened[0]

    yield start
    opened[0].close()


def test_batches_come_back_in_order_and_empty_ones_too(checks):
    running = checks([image(i, width=100 + i) for i in range(9)])
    running.submit([])
    assert [one.width for _ in range(3) for one in running.take()] == [100 + i for i in range(9)]
    assert running.take() == [] and not len(running)


def test_a_worker_killed_from_outside_costs_nothing(checks):
    running = checks([image(0)] * (BATCHES * EACH))
    facts = running.take()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # other tests of this process leave some that end by themselves
            if "forkserver" in " ".join(child.cmdline()) and child.ppid() != os.getpid():
                child.kill()
    facts += [one for _ in range(BATCHES - 1) for one in running.take()]
    assert len(facts) == BATCHES * EACH and all(one.error == "" for one in facts)


def test_an_image_that_kills_or_hangs_its_decoder_is_found_alone(checks, monkeypatch):
    images = [image(0)] * (BATCHES * EACH)
    bad = {17: FATAL, 18: FATAL, 90: ENDLESS}
    for i, data in bad.items():
        images[i] = data
    monkeypatch.setattr(checking, "check", check)
    monkeypatch.setattr(checking, "IMAGE_TIMEOUT_S", 3.0)
    running = checks(images)
    facts = [one for _ in range(BATCHES) for one in running.take()]
    assert {i: one.error for i, one in enumerate(facts) if one.error} == {
        17: "image_crashed: the decoder died on it",
        18: "image_crashed: the decoder died on it",
        90: "image_crashed: not decoded within 3 s",
    }


def started(script: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_ctrl_c_while_the_workers_load_is_the_callers_alone():
    """A terminal sends it to all processes; only the command itself has something to say."""
    process = started("""
import os, signal, time
from data_prep.ingest import checking
try:
    checking.warm_up()
    time.sleep(0.15)
    os.killpg(0, signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    print("stopped")
""")
    assert process.communicate() == ("stopped\n", "")


def test_a_caller_killed_by_sigkill_leaves_no_process_behind(tmp_path):
    (tmp_path / "pack").write_bytes(image(0))
    process = started(f"""
import time
from contextlib import suppress
from pathlib import Path
from data_prep.ingest import checking
from trainer.images.decoding import ImageLimits
if __name__ == "__main__":
    checks = checking.Checks(Path("{tmp_path}/pack"), ImageLimits(), 2)
    for _ in range(4):
        checks.submit([(0, {len(image(0))})])
        checks.take()
    print("ready", flush=True)
    time.sleep(100)
""")
    assert process.stdout and process.stdout.readline() == "ready\n"
    others = psutil.Process(process.pid).children(recursive=True)
    assert len(others) >= 3
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(others, timeout=15)
    assert all(has_ended(one.pid) for one in alive)
