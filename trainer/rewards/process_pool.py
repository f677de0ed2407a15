"""`Pool`: worker processes, killed and replaced at a deadline, one answer at a time (`worker.py` is their side).

Whatever dies, the nursery that forks the workers included, costs no verdict: the answer in hand is sent again.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.rewards.pool_worker import exactly, receive, send

START_TIMEOUT_S = 120.0
"""For a process to import math-verify or the user's file; a node under load takes its time."""
START_ATTEMPTS = 3
MAX_NURSERY_DEATHS = 5
"""After so many an answer is given up: a user function could be what kills them."""
MAX_STRETCH = 4.0
"""No answer may take longer than this many deadlines, however busy the node is."""


class Pool:
    """Worker processes, each with a thread that feeds it one task at a time and kills it at the deadline."""

    def __init__(self, workers: int, deadline_s: float, function: str = ""):
        self.deadline_s = deadline_s
        self.restarts = 0
        self._workers, self._function = workers, function
        self._tasks: queue.SimpleQueue[tuple[list[str], Future[Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._nursery: _Nursery | None = None
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, task: list[str]) -> Future[Any]:
        """Queues a task of `worker.grade_task`; its result, or ["timeout", 0.0] or ["error", 0.0]."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the grader is closed")
            while len(self._threads) < self._workers:
                thread = threading.Thread(target=self._serve, daemon=True, name=f"grader-{len(self._threads)}")
                self._threads.append(thread)
                thread.start()
        future: Future[Any] = Future()
        self._tasks.put((task, future))
        return future

    def check(self) -> None:
        """Starts one worker and ends it. Raises ConfigError if the user function cannot be loaded."""
        self._start().connection.close()

    def close(self) -> None:
        """Ends threads and processes; tasks under way end as errors."""
        with self._lock:
            self._closed = True
            nursery, self._nursery = self._nursery, None
        for _ in self._threads:
            self._tasks.put(None)
        if nursery is not None:
            nursery.close()
        for thread in self._threads:
            thread.join(timeout=5)

    def _serve(self) -> None:
        worker: _Worker | None = None
        while (item := self._tasks.get()) is not None:
            task, future = item
            try:
                worker, result = self._grade(worker, task)
                future.set_result(result)
            except Exception as error:
                worker = None
                future.set_exception(error)
        if worker is not None:
            worker.connection.close()

    def _grade(self, worker: _Worker | None, task: list[str]) -> tuple[_Worker | None, Any]:
        """One task to its end. Returns the worker to go on with, and the result.

        A worker that is gone may have been killed from outside or by this very task: one more try tells. One that went
        with its nursery tells nothing about the task.
        """
        deaths = nursery_deaths = 0
        while deaths <= 1 and nursery_deaths <= MAX_NURSERY_DEATHS:
            if worker is not None and _hung_up(worker.connection):  # killed while it had nothing to do
                self._drop(worker)
                worker = None
            try:
                worker = worker or self._start()
            except _Closed:
                return None, ["error", 0.0]
            try:
                return worker, self._ask(worker, task)
            except TimeoutError:
                self._drop(worker)
                return None, ["timeout", 0.0]
            except (OSError, EOFError):
                with self._lock:
                    with_nursery = worker.nursery.gone()
                deaths, nursery_deaths = deaths + (not with_nursery), nursery_deaths + with_nursery
                self._drop(worker)
                worker = None
        return None, ["error", 0.0]

    def _ask(self, worker: _Worker, task: list[str]) -> Any:
        """The worker's answer. Raises TimeoutError at the deadline, EOFError if the worker is gone.

        The clock stands still while the worker waits for a CPU, so that a busy node does not make wrong verdicts.
        """
        started, queued = time.monotonic(), _waited_for_cpu_s(worker.pid)
        send(worker.connection, task)
        poll = select.poll()
        poll.register(worker.connection, select.POLLIN)
        while True:
            elapsed = time.monotonic() - started
            left = self.deadline_s - elapsed + _waited_for_cpu_s(worker.pid) - queued
            if left <= 0 or elapsed > MAX_STRETCH * self.deadline_s:
                raise TimeoutError
            if poll.poll(max(left, 0.01) * 1000):
                return receive(worker.connection)

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            self.restarts += 1
            worker.connection.close()
            worker.nursery.kill(worker.pid)

    def _start(self) -> _Worker:
        """A new worker that is ready for tasks. Raises _Closed, or ConfigError if none can be started."""
        for _ in range(START_ATTEMPTS):
            try:
                worker = self._fork()
                worker.connection.settimeout(START_TIMEOUT_S)
                state, message = receive(worker.connection)
            except (OSError, EOFError):  # killed while it started
                continue
            if state != "ready":
                worker.connection.close()
                raise ConfigError(message.replace("\n", " "))
            worker.connection.settimeout(self.deadline_s)
            return worker
        raise ConfigError(
            f"no grading process started in {START_ATTEMPTS} attempts: see the messages above, and check the "
            "node's free memory and rewards.function"
        )

    def _fork(self) -> _Worker:
        """A new worker, of a new nursery where there is none. Raises OSError or EOFError if the nursery is gone."""
        with self._lock:
            if self._closed:
                raise _Closed
            if self._nursery is not None and self._nursery.gone():
                self._end_nursery()
            if self._nursery is None:
                self._nursery = _Nursery(self._function)
            try:
                return self._nursery.fork()
            except (OSError, EOFError):
                self._end_nursery()
                raise

    def _end_nursery(self) -> None:
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None


class _Closed(Exception):
    """The pool was closed meanwhile."""


@dataclass(frozen=True)
class _Worker:
    """One process that grades."""

    connection: socket.socket
    pid: int
    nursery: _Nursery


def _hung_up(connection: socket.socket) -> bool:
    """Whether the process at the other end of a socket pair is gone."""
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


def _waited_for_cpu_s(pid: int) -> float:
    """Seconds that a process was ready to run and had no CPU (Linux; 0 where the kernel does not tell)."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class _Nursery:
    """The process that forks workers (`worker.py`)."""

    def __init__(self, function: str):
        self.control, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
            "PYTHONHASHSEED": "0",  # sympy orders some terms by hash
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trainer.rewards.pool_worker", str(theirs.fileno()), function],
                pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.control.settimeout(START_TIMEOUT_S)
        if self.control.recv(1) != b"R":
            self.close()
            raise EOFError("the grader process did not start: see its message above")

    def gone(self) -> bool:
        """Whether it was killed. Its socket closes before the kernel kills its workers: never true too late."""
        return self.control.fileno() < 0 or _hung_up(self.control)

    def fork(self) -> _Worker:
        """A new worker. Raises OSError or EOFError if the nursery is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.control, [struct.pack("!cq", b"F", 0)], [theirs.fileno()])
        return _Worker(ours, struct.unpack("!q", exactly(self.control, 8))[0], self)

    def kill(self, pid: int) -> None:
        """Kills one worker; nothing happens if it is gone already."""
        with contextlib.suppress(OSError):
            self.control.sendall(struct.pack("!cq", b"K", pid))

    def close(self) -> None:
        """Ends the nursery and with it all workers."""
        self.control.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
