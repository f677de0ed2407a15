"""Whether a process is still there (an id may be reused), and a child that ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from trainer.system.exit_codes import EXIT_ERROR

PR_SET_PDEATHSIG = 1


def process_state(pid: int) -> str:
    """As in /proc: R, S, D, T, Z; empty where there is no such process."""
    fields = _fields(pid)
    return fields[0] if fields else ""


def has_ended(pid: int) -> bool:
    """Whether there is no such process, or only what its parent has not heard of yet."""
    return process_state(pid) in ("", "Z")


def started_ticks(pid: int) -> int:
    """When a process of this machine was started, in clock ticks since boot; 0 if there is none, or if it is
    a zombie. Two processes that had the same id differ in it."""
    fields = _fields(pid)
    return 0 if not fields or fields[0] == "Z" else int(fields[19])


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; [] where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def own_stamp() -> dict[str, Any]:
    """What tells this process from any other, to be written where another one asks `is_gone`."""
    return {"pid": os.getpid(), "pid_started": started_ticks(os.getpid()), "pid_space": _space()}


def is_gone(stamped: dict[str, Any]) -> bool:
    """Whether the process that wrote a `own_stamp` has ended; False where that cannot be known from here."""
    if stamped.get("pid_space") != _space() or "pid_started" not in stamped:
        return False
    return started_ticks(stamped["pid"]) != stamped["pid_started"]


def _space() -> str:
    """Which machine and container a process id belongs to."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """In a new process, also before it becomes its program: has Linux send it this signal when the parent is
    gone, however that ended. Elsewhere than on Linux nothing does.

    A parent that was gone before ends this process at once: no handler runs here, which before the program
    would be the parent's.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(EXIT_ERROR)
