"""Joins a Ray cluster, or starts one on this machine, in several attempts.

Ray's agents see only after minutes, or never, that their node is gone. So this module as a program watches a
driver that has started Ray, and ends what a killed one leaves. The agents change their names and command
lines: nothing but their descent tells whose they are.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from trainer.system.backoff import Backoff
from trainer.system.errors import RayError
from trainer.system.processes import has_ended, started_ticks

STARTS = Backoff(attempts=3, first_wait_s=5.0)
LOOK_S = 2.0
GRACE_S = 3.0
"""What Ray's processes have to end by themselves."""
ROOT = Path(__file__).resolve().parents[3]


def connect_to_ray(**options: Any) -> None:
    """`ray.init(**options)`; a Ray that this starts ends with this process. Raises RayError."""
    import ray

    def start() -> None:
        try:
            ray.init(**options)
        except Exception:  # Ray raises a bare Exception where the start takes longer than its 30 s
            ray.shutdown()
            raise

    def told(error: Exception, failures: int, wait_s: float) -> None:
        again = f"attempt {failures + 1} of {STARTS.attempts}"
        print(f"Ray did not start ({_first(error)}): {again}", file=sys.stderr, flush=True)

    try:
        STARTS.call(start, lambda error: True, told)
    except Exception as error:
        raise RayError(f"Ray did not start in {STARTS.attempts} attempts ({_first(error)})") from None
    if not os.environ.get("RAY_ADDRESS"):
        _end_with_this_process()


def _first(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _end_with_this_process() -> None:
    """Starts to watch this process."""
    pid = os.getpid()
    command = [sys.executable, "-m", __name__, str(pid), str(started_ticks(pid))]
    null = subprocess.DEVNULL
    subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdin=null, stdout=null, stderr=null)


def watch_process(pid: int, started: int, look_s: float = LOOK_S, grace_s: float = GRACE_S) -> None:
    """Until the process `pid`, which started at `started` ticks, is gone; then ends its descendants."""
    descendants: dict[int, int] = {}
    while started_ticks(pid) == started:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(pid).children(recursive=True):
                descendants.setdefault(child.pid, started_ticks(child.pid))
        _wait_for_its_end(pid, look_s)
    descendants.pop(os.getpid(), None)
    deadline = time.monotonic() + grace_s
    while (left := _alive(descendants)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for child in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _wait_for_its_end(pid: int, timeout_s: float) -> None:
    """Returns at once when the process ends."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return time.sleep(0 if has_ended(pid) else timeout_s)
    try:
        select.select([descriptor], [], [], timeout_s)
    finally:
        os.close(descriptor)


def _alive(known: dict[int, int]) -> list[int]:
    """Those of the processes, each with the ticks of its start, that still run."""
    return [pid for pid, start in known.items() if start and started_ticks(pid) == start]


if __name__ == "__main__":
    watch_process(int(sys.argv[1]), int(sys.argv[2]))
