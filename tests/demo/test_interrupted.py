"""Ctrl-C in the demo's warm-up: answered at once, while what runs saves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAVES = """#!/bin/sh
trap 'sleep 60; exit 130' INT
touch "$READY"
while true; do sleep 0.1; done
"""
WARM_UP = """
import sys
from pathlib import Path
from examples.demo import warm_start
warm_start.sys.executable = sys.argv[1]
sys.exit(warm_start.supervised(Path(sys.argv[2]), 10))
"""


def test_the_first_ctrl_c_is_answered_at_once_and_the_second_ends_it(tmp_path):
    trainer, ready = tmp_path / "trainer", tmp_path / "ready"
    trainer.write_text(SAVES)
    trainer.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", WARM_UP, str(trainer), str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"READY": str(ready)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout
    lines = [process.stdout.readline()]
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    pressed = time.monotonic()
    lines.append(process.stdout.readline())
    assert time.monotonic() - pressed < 20.0, "before what runs has saved"
    assert lines[1] == "stopping the warm-up, which saves first; Ctrl-C again ends it at once\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    assert "the same command goes on from its last checkpoint" in process.stdout.read()
