"""The program of every process that runs other code than the trainer's: users' reward functions and
environments, models' programs, and graders, which a completion may hang.

    python -m trainer.system.answering_process FD PARENT MODULE:NAME ARGUMENTS...

NAME(*ARGUMENTS) makes an `Answerer`. Messages come over the connection FD, one at a time. When the trainer
dies, even by SIGKILL in the middle of a message, a keeper ends this process and all that it has started.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from trainer.system.errors import ConfigError
from trainer.system.own_file import OwnFileError
from trainer.system.processes import end_with_parent

PR_SET_CHILD_SUBREAPER = 36
TRIES = 200
"""Rounds of killing: what forks while it is killed leaves orphans for the next round."""


class Answerer(Protocol):
    """What answers the messages of a process."""

    about: Mapping[str, Any]
    """JSON values that are sent when it is ready."""

    def answer(self, message: bytes) -> bytes:
        """The reply to a message."""


def serve(connection: Connection, maker: str, arguments: Sequence[str]) -> None:
    """Sends ["ready", about], ["lacks", why] where a package is missing, or ["failed", why]. Then answers
    until the other side closes the connection."""
    module, _, name = maker.partition(":")
    try:
        answerer: Answerer = getattr(import_module(module), name)(*arguments)
        hello = json.dumps(["ready", {"pid": os.getpid(), **answerer.about}])
    except BaseException as error:
        state = "lacks" if isinstance(error, OwnFileError) and error.lacks_module else "failed"
        named = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        connection.send_bytes(json.dumps([state, f"{named}{error}"]).encode())
        return
    connection.send_bytes(hello.encode())
    own = os.getpid()
    while True:
        reply = answerer.answer(connection.recv_bytes())
        if os.getpid() != own:  # the code has forked and came back twice
            os._exit(0)
        connection.send_bytes(reply)


def run_under_keeper(parent: int, connection: int, body: Callable[[], None]) -> None:
    """Runs `body` in a child; returns in neither process.

    This process becomes the child's keeper. Linux gives it every orphan among its descendants, also those
    with sessions of their own (a subreaper). It ends when the child has ended, when it is told to (SIGTERM)
    and when the trainer is gone, and all descendants with it.

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
    pids: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        pids += below
        queue += below
    return pids


def main() -> None:
    descriptor, parent, maker, *arguments = sys.argv[1:]

    def body() -> None:
        with contextlib.suppress(EOFError, OSError):
            serve(Connection(int(descriptor)), maker, arguments)

    run_under_keeper(int(parent), int(descriptor), body)


if __name__ == "__main__":
    main()
