"""One launcher and one driver at a time in a run's folder, and no driver that outlives its launcher."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from trainer.config import ConfigError
from trainer.system.processes import started_ticks

LAUNCHER_VARIABLE = "SPOTRL_LAUNCHER_PID"
"""Names the launcher's process id to the driver, which ends with it."""
ENDING_S = 60.0
"""How long a start waits for another one that is ending."""


class RunLock:
    """A lock on a run's folder, held until this process ends. role: "launcher" or "driver"."""

    def __init__(self, run_dir: str | Path, role: str):
        self.path = Path(run_dir) / f".{role}.lock"
        self._file = -1

    def take(self, wait: bool = False) -> None:
        """Takes the lock. Waits for a holder that is ending, and with `wait` for any, at most ENDING_S.

        Raises ConfigError naming the process that holds it, or if the folder cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            why = f"{self.path.parent} cannot be written ({error.strerror})"
            raise ConfigError(f"{why}: choose another run.dir") from None
        deadline = time.monotonic() + ENDING_S
        shown = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = self._holder(file)
                who = f"process {holder.get('pid')} on {holder.get('host')}"
                if not (wait or holder.get("ending")) or time.monotonic() > deadline:
                    os.close(file)
                    why = f"the run in {self.path.parent} is already held by {who}"
                    raise ConfigError(f"{why}: wait for it, or end that process") from None
                if not shown:
                    shown = True
                    print(f"waiting for {who} to end", flush=True)
                time.sleep(0.2)
        self._file = file
        self._write(ending=False)

    def ending(self) -> None:
        """Marks this process as ending: a second start then waits for it."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                self._write(ending=True)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, ending: bool) -> None:
        data = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "ending": ending}).encode()
        os.pwrite(self._file, data.ljust(256), 0)

    @staticmethod
    def _holder(file: int) -> dict:
        try:
            return json.loads(os.pread(file, 256, 0))
        except ValueError:
            return {}


def die_with_launcher(env: Mapping[str, str] = os.environ) -> None:
    """Ends this driver at once when the launcher is gone. Ray, its parent, would keep it alive."""
    if pid := env.get(LAUNCHER_VARIABLE):
        threading.Thread(target=_watch, args=(int(pid),), name="launcher", daemon=True).start()


def _watch(pid: int) -> None:
    started = started_ticks(pid)  # a process id alone may be reused
    while started and started_ticks(pid) == started:
        time.sleep(1.0)
    print("the launcher is gone: ending", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
