"""The program of every process that runs other code than the trainer's: users' reward functions and
environments, models' programs, and graders, which a completion may hang.

    python -m trainer.system.answering_process FD PARENT KEPT MODULE:NAME ARGUMENTS...

NAME(*ARGUMENTS) makes an `Answerer`. Messages come over the connection FD, one at a time. When the trainer
dies, even by SIGKILL in the middle of a message, the kernel ends this process. KEPT is `kept` where a keeper
ends what the code has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Protocol

from trainer.system.errors import ConfigError
from trainer.system.own_file import OwnFileError
from trainer.system.process_keeper import run_under_keeper
from trainer.system.processes import end_with_parent


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


def main() -> None:
    descriptor, parent, kept, maker, *arguments = sys.argv[1:]

    def body() -> None:
        with contextlib.suppress(EOFError, OSError):
            serve(Connection(int(descriptor)), maker, arguments)

    if kept == "kept":
        run_under_keeper(int(parent), int(descriptor), body)
    # A platform that signals every process of a job ends no grader that another completion would need again.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(int(parent))
    body()


if __name__ == "__main__":
    main()
