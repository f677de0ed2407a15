"""Processes beside the engine, in which tools run that may hang, crash, or take all memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.config import ConfigError
from trainer.system.guarded_process import GuardedProcess, TookTooMuch

START_S = 120.0
"""Time for a process to load the tool on a busy node."""
MOST_BYTES = 2 << 30
"""Memory that a process may take for one call."""
LONGEST_REPLY = 256 << 20
"""Bytes of what a process replies with, images included."""


class ToolFailure(Exception):
    """What became of a call, for the model to read."""


class ToolProcesses:
    """Processes that answer calls, one call at a time each; one that fails is ended and replaced.

    There are as many as calls are made at once. All methods may be called by several threads.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        deadline_s: float,
        *,
        kept: bool,
        environment: Mapping[str, str] = os.environ,
        python: str = "",
    ) -> None:
        """module, python: what runs, as in `GuardedProcess`; its first message is JSON: ["ready", about], or
        ["failed", why]."""
        self.deadline_s = deadline_s
        self._module, self._arguments = module, arguments
        self._kept, self._environment = kept, environment
        self._python = python
        self._idle: list[GuardedProcess] = []
        # Linux ends a process with the thread that started it: this one stays, callers' threads may not.
        self._starter = ThreadPoolExecutor(1, "tool-starter")

    def about(self) -> dict[str, Any]:
        """What a process says of its tool. Raises ConfigError if it cannot be loaded."""
        process, about = self._start()
        self._idle.append(process)
        return about

    def ask(self, message: bytes) -> bytes:
        """The reply to a message. Raises ToolFailure.

        A process that is gone may have been killed from outside or by this call: a second try shows which.
        """
        for _ in range(2):
            process = self._idle.pop() if self._idle else self._start()[0]
            try:
                reply = process.ask(message, self.deadline_s, MOST_BYTES, LONGEST_REPLY)
            except TimeoutError:
                self._end(process)
                raise ToolFailure(f"no result within {self.deadline_s:g} seconds") from None
            except TookTooMuch:
                self._end(process)
                raise ToolFailure(f"it took more than {MOST_BYTES >> 30} GiB of memory") from None
            except (OSError, EOFError):
                self._end(process)
                continue
            self._idle.append(process)
            return reply
        raise ToolFailure("the tool crashed")

    def close(self) -> None:
        """Ends the processes that have nothing to do."""
        while self._idle:
            self._end(self._idle.pop())

    def _start(self) -> tuple[GuardedProcess, dict[str, Any]]:
        try:
            process = self._starter.submit(
                GuardedProcess,
                self._module,
                self._arguments,
                kept=self._kept,
                what="turns: a tool",
                environment=self._environment,
                python=self._python,
            ).result()
        except (FileNotFoundError, PermissionError) as error:
            raise ConfigError(f"turns.python {self._python}: {error.strerror}") from None
        try:
            if not process.connection.poll(START_S):
                raise EOFError
            state, about = json.loads(process.connection.recv_bytes())
        except (OSError, EOFError):
            self._end(process)
            raise ConfigError(
                "turns.environment: its process did not start: see the messages above, and check the node's"
                " free memory"
            ) from None
        if state != "ready":
            self._end(process)
            raise ConfigError(str(about))
        process.pid = about["pid"]
        return process, about

    def _end(self, process: GuardedProcess) -> None:
        process.kill()
        process.end()
