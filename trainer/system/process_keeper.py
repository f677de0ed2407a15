"""Ends whatever a user's file started: processes that it forked, in sessions of their own, too.

The keeper is the parent of a process that calls a user's file, such as a grader. Linux gives it every orphan
among its descendants (a subreaper). It ends when that process has ended, when it is told to (SIGTERM) and
when the trainer is gone, and all descendants with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainer.system.processes import end_with_parent

PR_SET_CHILD_SUBREAPER = 36
TRIES = 200
"""Rounds of killing: what forks while it is killed leaves orphans for the next round."""


def run_under_keeper(parent: int, connection: int, body: Callable[[], None]) -> None:
    """Runs `body` in a child; returns in neither process.

    parent: the trainer. connection: the child's file descriptor, which nobody else may hold open.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ends = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    end_with_parent(parent, signal.SIGTERM)
    me = os.getpid()
    child = os.fork()
    if not child:
        _usual_signals()
        end_with_parent(me)
        with contextlib.suppress(BaseException):
            body()
        os._exit(0)
    os.close(connection)
    while signal.sigwait(ends) == signal.SIGCHLD and child not in _reaped():
        pass
    for _ in range(TRIES):
        below = descendants(me)
        if not below:
            break
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        _reaped()
    os._exit(0)


def _usual_signals() -> None:
    """Signals as a program finds them that nothing was done to: what is ignored or blocked stays so in all
    that the program starts, and `Process.terminate()` would end nothing."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _reaped() -> set[int]:
    """Takes the ended children's results; returns their ids."""
    ended = set()
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.add(pid)
    return ended


def descendants(root: int) -> list[int]:
    """Processes that a process started, and those that they started."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found
