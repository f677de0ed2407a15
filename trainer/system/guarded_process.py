"""A process that answers messages, with its deadline and its memory watched from outside: what it runs may
hang, crash, print without end or take all memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

OUTPUT_BYTES = 64 << 10
"""What one process may print; the rest is dropped, else a function that prints fills the run's log and
disk."""
MAX_STRETCH = 4.0
"""Number of deadlines that a message may take at most, however busy the node is."""
END_S = 5.0
"""Longest wait for a keeper to end what its process started."""
LOOK_S = 0.25
"""Between two looks at the memory of a process at work."""


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


class GuardedProcess:
    """A process of `answering_process.py`, and the connection to it."""

    def __init__(
        self,
        maker: str,
        arguments: Sequence[str],
        *,
        kept: bool,
        what: str,
        environment: Mapping[str, str],
        python: str = "",
    ) -> None:
        """maker: `module:name`, which makes what answers of the arguments. kept: whether what is started is
        the process's keeper (process_keeper.py), which ends all that the process started. what: who prints,
        for the log: "rewards: a grader". python: the interpreter; empty: this one."""
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, environment.get("PYTHONPATH", "")]
        own = {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.connection, theirs = multiprocessing.Pipe()
        words = [str(theirs.fileno()), str(os.getpid()), "kept" if kept else "bare", maker, *arguments]
        with theirs:
            self.process = subprocess.Popen(
                [python or sys.executable, "-P", "-m", "trainer.system.answering_process", *words],
                pass_fds=[theirs.fileno()],
                env={**environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid
        """Id of the process that answers; until it has said so, of the one that was started."""
        self._kept = kept
        forward = threading.Thread(target=_forward, args=(self.process, what), daemon=True, name="output")
        forward.start()

    def kill(self) -> None:
        """Ends it, and what it started, without waiting."""
        if self._kept:
            self.process.terminate()
        else:
            self.process.kill()

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


def _started_by(root: int) -> list[int]:
    """Processes that a process started, and those that they started, as the kernel lists children; none where
    it does not."""
    found: list[int] = []
    queue = [root]
    while queue:
        for children in Path(f"/proc/{queue.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError, ValueError):
                below = [int(pid) for pid in children.read_text().split()]
                found += below
                queue += below
    return found


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


def _forward(process: subprocess.Popen[bytes], what: str) -> None:
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
                    print(f"\n{what} prints more; the rest is dropped", file=sys.stderr, flush=True)


def waited_for_cpu_s(pid: int) -> float:
    """Seconds that a process was ready to run and had no CPU (Linux); 0 if the kernel does not count them."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
