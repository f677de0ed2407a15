"""What descends from a killed driver ends with it, under whatever name and in whatever session."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from trainer.node.launch.ray_client import watch_process
from trainer.system.processes import has_ended, process_state, started_ticks

DRIVER = """
import subprocess, sys, time
agent = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"
raylet = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {agent!r}]); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", raylet])
time.sleep(60)
"""


def test_a_killed_drivers_descendants_end_and_no_others():
    other = subprocess.Popen(["sleep", "60"])
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    agent = int(driver.stdout.readline())
    watching = threading.Thread(target=watch_process, args=(driver.pid, started_ticks(driver.pid), 0.05, 0.1))
    try:
        watching.start()
        time.sleep(0.5)
        assert process_state(agent) == "S"
        driver.kill()
        driver.wait()
        watching.join(20)
        deadline = time.monotonic() + 10
        while not has_ended(agent):
            assert time.monotonic() < deadline, "the agent outlives its driver"
            time.sleep(0.02)
        assert other.poll() is None
    finally:
        driver.kill()
        other.kill()
