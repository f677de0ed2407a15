"""Processes that answer messages (answering_process.py), one message at a time each: what they run may hang,
crash, print without end or take all memory. Deadline and memory are watched from outside; a process that
fails is ended and replaced."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.system.errors import ConfigError

START_S = 120.0
"""Time for a process to load what answers on a busy node."""
START_ATTEMPTS = 3
LONGEST_REPLY = 256 << 20
"""Bytes of a reply, images included."""
OUTPUT_BYTES = 64 << 10
"""What one process may print; the rest is dropped, else it could fill the run's log and disk."""
MAX_STRETCH = 4.0
"""Number of deadlines that a message may take at most, however busy the node is."""
END_S = 5.0
"""Longest wait for a keeper to end what its process started."""
LOOK_S = 0.25
"""Between two looks at the memory of a process at work."""


class LacksModule(ConfigError):
    """A user's file imports a package that this machine does not have."""


class Crashed(Exception):
    """A message ended its process twice."""


class SetClosed(Exception):
    """The set was closed while a message waited."""


class TookTooMuch(Exception):
    """A process took more memory for a message than it may."""

    def __init__(self, taken_bytes: int) -> None:
        super().__init__(f"{taken_bytes / 2**30:.1f} GiB")
        self.taken_bytes = taken_bytes


HANDED_ON = """
PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TMP TEMP VIRTUAL_ENV PYTHONPATH PYTHONHASHSEED
LD_LIBRARY_PATH LD_PRELOAD HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE TRANSFORMERS_OFFLINE SSL_CERT_FILE SSL_CERT_DIR
REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NO_PROXY no_proxy SPOTRL_GIVEN_IN
"""
"""Variables that code which is not the trainer's finds without asking; and LC_*."""


def handed_on(names: str = "", env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of code that is not the trainer's: no token of the run, unless it is among the names
    that were asked for, which commas separate."""
    wanted = {*HANDED_ON.split(), *(name.strip() for name in names.split(","))}
    return {name: value for name, value in env.items() if name in wanted or name.startswith("LC_")}


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What is started, and what it may take."""

    maker: str
    """`module:name` of what makes the answerer of `arguments`."""
    arguments: Sequence[str] = ()
    key: str
    """The option that names it, for messages and before what it prints."""
    most_bytes: int = 0
    """Memory that a process and its children may take for one message; 0: any."""
    leak_bytes: int = 0
    """Memory that a process may gain after its first reply, before it is replaced; 0: any."""
    environment: Mapping[str, str] = field(default_factory=handed_on)
    python: str = ""


class GuardedProcess:
    """A process of `answering_process.py`, and the connection to it."""

    def __init__(self, guard: Guard) -> None:
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, guard.environment.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        own |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.connection, theirs = multiprocessing.Pipe()
        command = [guard.python or sys.executable, "-P", "-m", "trainer.system.answering_process"]
        command += [str(theirs.fileno()), str(os.getpid()), guard.maker, *guard.arguments]
        with theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env={**guard.environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid
        """Id of the process that answers; until it has said so, of its keeper."""
        output = self.process, guard.key
        threading.Thread(target=_forward, args=output, daemon=True, name="output").start()

    def kill(self) -> None:
        """Ends it, and what it started, without waiting."""
        self.process.terminate()

    def end(self) -> None:
        """Waits until a process that was killed is gone."""
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:  # its keeper stands still
            self.process.kill()
            self.process.wait()
        self.connection.close()

    def held_bytes(self, shared_once: bool = False) -> int:
        """Resident memory of it and of what it started; 0 if it is gone. shared_once: pages that several of
        them share count once, which takes longer to find out."""
        resident = _proportional_bytes if shared_once else _resident_bytes
        return sum(resident(pid) for pid in [self.pid, *_started_by(self.process.pid)])

    def ask(
        self, message: bytes, deadline_s: float, most_bytes: int = 0, longest_reply: int | None = None
    ) -> bytes:
        """The reply to a message. Raises TimeoutError at the deadline, EOFError or OSError if the process is
        gone or replies with more bytes than `longest_reply`, TookTooMuch if it takes more than `most_bytes`
        of memory for it (0: any amount).

        Time in which the process waits for a CPU does not count, so that a busy node causes no wrong
        results.
        """
        started = time.monotonic()
        waited_before_s = waited_for_cpu_s(self.pid)
        held_before = self.held_bytes() if most_bytes else 0
        self.connection.send_bytes(message)
        while True:
            elapsed = time.monotonic() - started
            waited_s = waited_for_cpu_s(self.pid) - waited_before_s
            left = deadline_s - elapsed + waited_s
            if left <= 0 or elapsed > MAX_STRETCH * deadline_s:
                raise TimeoutError
            pause = min(left, LOOK_S) if most_bytes else left
            if self.connection.poll(max(pause, 0.01)):
                return self.connection.recv_bytes(longest_reply)
            if most_bytes and self.held_bytes() - held_before > most_bytes:
                taken = self.held_bytes(shared_once=True) - held_before
                if taken > most_bytes:
                    raise TookTooMuch(taken)


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
        held = process.held_bytes() if self.guard.leak_bytes else 0
        gained = held - self._first_bytes.setdefault(process, held)
        if gained <= self.guard.leak_bytes:
            return False
        print(f"{self.guard.key}: its memory grew by {gained / 2**30:.1f} GiB: replaced", file=sys.stderr)
        return True

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
                process = self._starter.submit(GuardedProcess, guard).result()
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


def _started_by(root: int) -> list[int]:
    """All that descends from a process as the kernel lists children; none where it does not."""
    pids: list[int] = []
    queue = [root]
    while queue:
        for children in Path(f"/proc/{queue.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError, ValueError):
                below = [int(pid) for pid in children.read_text().split()]
                pids += below
                queue += below
    return pids


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _proportional_bytes(pid: int) -> int:
    """Memory of a process, its part alone of what it shares with others."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except (OSError, IndexError, ValueError):
        pass
    return _resident_bytes(pid)


def _forward(process: subprocess.Popen[bytes], title: str) -> None:
    """Passes on the first OUTPUT_BYTES that a process prints, and reads the rest."""
    left = OUTPUT_BYTES
    assert process.stdout is not None
    with process.stdout as output:
        while piece := os.read(output.fileno(), 1 << 16):
            if left > 0:
                sys.stderr.write(piece[:left].decode(errors="replace"))
                sys.stderr.flush()
                left -= len(piece)
                if left <= 0:
                    print(f"\n{title} prints more; the rest is dropped", file=sys.stderr, flush=True)


def waited_for_cpu_s(pid: int) -> float:
    """Seconds that a process was ready to run and had no CPU (Linux); 0 if the kernel does not count them."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
