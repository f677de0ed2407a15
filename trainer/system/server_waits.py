"""Which servers this process waits for, told to its node's launcher and to a person.

A reward server, a judge, a bucket or the hub may be away for a while. Who waits for one says so here, with
the longest time that it will wait: the watchdog then takes the wait for progress, and names the server.
Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from trainer.system import processes

Kind = Literal["grading", "storing"]
"""What the server does for the run: grades, or keeps its files."""

FOLDER_VARIABLE = "SPOTRL_BEACONS"
"""The folder in which a node's processes report to their launcher; without it nothing is recorded."""
TELL_S = 20.0
"""A wait in which nothing has failed is named to a person after this time."""
AGAIN_S = 300.0
"""Seconds between two lines about one wait."""


@dataclass(frozen=True)
class ServerWait:
    """A server that a process waits for."""

    kind: Kind
    what: str
    """For a person, such as "the reward server at http://10.0.0.5:5000"."""
    since_unix_s: float
    since_s: float
    """The same by the machine's uptime, which nobody sets."""
    limit_s: float
    """Longest time that the process waits before it ends the run by itself."""
    why: str = ""
    """The last failure; empty where no reply has come yet."""

    @property
    def notable(self) -> bool:
        """Whether a person is to be told of it."""
        return bool(self.why) or time.monotonic() - self.since_s > TELL_S

    def __str__(self) -> str:
        since = time.strftime("%H:%M:%S", time.gmtime(self.since_unix_s))
        why = f" ({self.why})" if self.why else ""
        return f"waiting for {self.what} since {since} UTC, for at most {self.limit_s / 60:.0f} min{why}"


_waits: dict[int, ServerWait] = {}
"""The waits of this process, by a number of their own."""
_lock = threading.Lock()
_shown: dict[str, float] = {}
"""When a person was last told of the wait for a server, by its name."""


@contextlib.contextmanager
def waiting_for(kind: Kind, server: str, limit_s: float) -> Generator[Waiter]:
    """Says for the time of the block that this process waits for a server."""
    waiter = Waiter(kind, server, limit_s)
    try:
        yield waiter
    finally:
        waiter.end()


class Waiter:
    """One wait of this process. Threads may share it."""

    def __init__(self, kind: Kind, server: str, limit_s: float) -> None:
        self._wait = ServerWait(kind, server, time.time(), time.monotonic(), limit_s)
        self._put(self._wait)

    def failed(self, why: str) -> None:
        """Says why the server has not answered. Without a launcher, which prints this, so does it."""
        self._wait = replace(self._wait, why=why)
        self._put(self._wait)
        if os.environ.get(FOLDER_VARIABLE):
            return
        now = time.monotonic()
        if now - _shown.get(self._wait.what, -math.inf) > AGAIN_S:
            _shown[self._wait.what] = now
            print(self._wait, file=sys.stderr, flush=True)

    def end(self) -> None:
        """The server has answered, or is given up."""
        self._put(None)

    def _put(self, wait: ServerWait | None) -> None:
        with _lock:
            if wait is None:
                _waits.pop(id(self), None)
            else:
                _waits[id(self)] = wait
            _write()


def _write() -> None:
    """Tells the launcher. A full disk is met by the run's own writes."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    path = Path(folder) / f"waits-{os.getpid()}.json"
    with contextlib.suppress(OSError):
        if _waits:
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps([asdict(wait) for wait in _waits.values()]))
            temporary.replace(path)
        else:
            path.unlink(missing_ok=True)


def read_waits(folder: Path) -> list[ServerWait]:
    """The waits of this node's processes that still run and are within their limits, the oldest first."""
    waits = []
    for path in folder.glob("waits-*.json"):
        if processes.process_state(int(path.stem.removeprefix("waits-"))) in ("", "Z", "T", "t"):
            continue
        with contextlib.suppress(OSError, ValueError, TypeError):
            for fields in json.loads(path.read_text()):
                wait = ServerWait(**fields)
                if time.monotonic() - wait.since_s <= wait.limit_s:
                    waits.append(wait)
    return sorted(waits, key=lambda wait: wait.since_s)
