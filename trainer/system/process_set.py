"""Processes that answer messages (answering_process.py), one message at a time each. One that is too slow,
takes too much memory or crashes is ended and replaced."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from trainer.system.errors import ConfigError
from trainer.system.guarded_process import GuardedProcess, TookTooMuch, handed_on

START_S = 120.0
"""Time for a process to load what answers on a busy node."""
START_ATTEMPTS = 3
LONGEST_REPLY = 256 << 20
"""Bytes of a reply, images included."""


class LacksModule(ConfigError):
    """A user's file imports a package that this machine does not have."""


class Crashed(Exception):
    """A message ended its process twice."""


class SetClosed(Exception):
    """The set was closed while a message waited."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What is started, and what it may take."""

    maker: str
    """`module:name` of what makes the answerer of `arguments`."""
    arguments: Sequence[str] = ()
    key: str
    """The option that names it, for messages."""
    kept: bool = True
    """Whether a keeper ends what it starts: all code of users' has one."""
    most_bytes: int = 0
    """Memory that a process and its children may take for one message; 0: any."""
    leak_bytes: int = 0
    """Memory that a process may gain after its first reply, before it is replaced; 0: any."""
    environment: Mapping[str, str] = field(default_factory=handed_on)
    python: str = ""


class ProcessSet:
    """As many processes as messages are sent at once. All methods may be called by several threads."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.restarts = 0
        """Processes that were ended and replaced."""
        self._idle: list[GuardedProcess] = []
        self._all: set[GuardedProcess] = set()
        self._first_bytes: dict[GuardedProcess, int] = {}
        self._closed = False
        # Linux ends a process with the thread that started it: this one stays, callers' threads may not.
        self._starter = ThreadPoolExecutor(1, "starter")

    def about(self) -> dict[str, Any]:
        """What a process says of itself. Raises ConfigError if it cannot be started, LacksModule if a user's
        file wants a package that is not here."""
        process, about = self._start()
        self._idle.append(process)
        return about

    def pids(self) -> list[int]:
        """Ids of the processes that answer."""
        return [process.pid for process in list(self._all)]

    def ask(self, message: bytes, deadline_s: float) -> bytes:
        """The reply to a message. Raises TimeoutError, TookTooMuch, Crashed, and SetClosed.

        A process that is gone may have been killed from outside or by this message: a second try shows which.
        """
        for _ in range(2):
            process = self._idle_process() or self._start()[0]
            try:
                reply = process.ask(message, deadline_s, self.guard.most_bytes, LONGEST_REPLY)
            except (TimeoutError, TookTooMuch):
                self._replace(process)
                raise
            except (OSError, EOFError):
                self._replace(process)
                continue
            if self._leaks(process):
                self._replace(process)
            else:
                self._idle.append(process)
            return reply
        raise Crashed

    def close(self) -> None:
        """Ends all processes; what waits for a reply gets none."""
        self._closed = True
        for process in list(self._all):
            process.kill()
        while self._idle:
            self._end(self._idle.pop())

    def _idle_process(self) -> GuardedProcess | None:
        while self._idle:
            process = self._idle.pop()
            if process.process.poll() is None:
                return process
            self._replace(process)  # killed while it had nothing to do
        return None

    def _leaks(self, process: GuardedProcess) -> bool:
        if not self.guard.leak_bytes:
            return False
        held = process.held_bytes()
        gained = held - self._first_bytes.setdefault(process, held)
        leaks = gained > self.guard.leak_bytes
        if leaks:
            print(f"{self.guard.key}: its memory grew by {gained / 2**30:.1f} GiB: replaced", file=sys.stderr)
        return leaks

    def _replace(self, process: GuardedProcess) -> None:
        self.restarts += 1
        self._end(process)

    def _end(self, process: GuardedProcess) -> None:
        process.kill()
        process.end()
        self._all.discard(process)
        self._first_bytes.pop(process, None)

    def _start(self) -> tuple[GuardedProcess, dict[str, Any]]:
        """A process that is ready, and what it says of itself. Raises ConfigError, LacksModule, SetClosed."""
        guard = self.guard
        for _ in range(START_ATTEMPTS):
            if self._closed:
                raise SetClosed
            try:
                process = self._starter.submit(
                    GuardedProcess,
                    guard.maker,
                    guard.arguments,
                    kept=guard.kept,
                    what=guard.key,
                    environment=guard.environment,
                    python=guard.python,
                ).result()
            except (FileNotFoundError, PermissionError) as error:
                raise ConfigError(f"turns.python {guard.python}: {error.strerror}") from None
            self._all.add(process)
            try:
                if not process.connection.poll(START_S):
                    raise EOFError
                state, about = json.loads(process.connection.recv_bytes())
            except (OSError, EOFError):  # killed while it started
                self._end(process)
                continue
            if state != "ready":
                self._end(process)
                kind = LacksModule if state == "lacks" else ConfigError
                raise kind(" ".join(str(about).split()))
            process.pid = about["pid"]
            return process, about
        raise ConfigError(
            f"{guard.key}: no process started in {START_ATTEMPTS} attempts: see the messages above, and check"
            " the node's free memory"
        )
