"""Processes that grade (`pool_worker.py`), one task at a time; a process is killed and replaced at a
deadline."""

from __future__ import annotations

import json
import queue
import sys
import threading
from concurrent.futures import Future
from typing import Any

from trainer.config import ConfigError
from trainer.hardware.host_memory import available_memory
from trainer.system.guarded_process import GuardedProcess, TookTooMuch

START_TIMEOUT_S = 120.0
"""Time for a process to import the grader or the user's file on a busy node."""
START_ATTEMPTS = 3
MEMORY_BYTES = 4 << 30
"""Address space of all built-in graders together. A process needs 30 MiB to start."""

LEAK_BYTES = 1 << 30
"""Memory that a process with a user's function may gain after its first result, before it is replaced."""
CALLS_SHARE = 0.5
"""Share of the memory that is free at the start, for all that calls of a user's function take at once. One
that takes more than its process's part is ended: the kernel, or Ray, would end ranks instead."""


class PoolClosed(Exception):
    """The pool was closed while a task ran."""


class TaskTooLarge(Exception):
    """A task took more memory than its process may."""


class LacksModule(ConfigError):
    """A user's file imports a package that this machine does not have."""


class ProcessPool:
    """Grader processes, each with a thread that gives it one task at a time and kills it at the deadline."""

    def __init__(self, workers: int, deadline_s: float, functions: str = "", task_packages: str = ""):
        """functions: a user's, as `functions.load_all` reads them. task_packages: folder of the task
        families.

        Each process loads what is given before its first task.
        """
        self.deadline_s = deadline_s
        self.restarts = 0
        self._workers = workers
        self._loads = functions, task_packages
        self._call_bytes = 0
        if functions:
            free = int(CALLS_SHARE * available_memory()) // workers
            self._call_bytes = max(LEAK_BYTES, free)
        self._tasks: queue.SimpleQueue[tuple[list[str], Future[Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._processes: set[_GraderProcess] = set()
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, task: list[str]) -> Future[Any]:
        """Queues a task of `pool_worker.grade_task`. It results in ["timeout", 0.0, why, {}] or ["error",
        0.0, why, {}] if it fails."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the grader is closed")
            if len(self._threads) < self._workers:
                thread = threading.Thread(
                    target=self._serve, daemon=True, name=f"grader-{len(self._threads)}"
                )
                self._threads.append(thread)
                thread.start()
        future: Future[Any] = Future()
        self._tasks.put((task, future))
        return future

    def check(self) -> bool:
        """Starts one process and ends it. Returns whether a user's function wants token ids.

        Raises ConfigError if the function cannot be loaded, LacksModule if its file wants a package that is
        not here.
        """
        worker = self._start()
        self._end(worker)
        return worker.wants_ids

    def pids(self) -> list[int]:
        """Ids of the processes that run now."""
        with self._lock:
            return [worker.pid for worker in self._processes]

    def close(self) -> None:
        """Ends threads and processes; tasks that run end as errors."""
        with self._lock:
            self._closed = True
            for worker in self._processes:
                worker.kill()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(timeout=5)

    def _serve(self) -> None:
        worker: _GraderProcess | None = None
        while (item := self._tasks.get()) is not None:
            task, future = item
            if not future.set_running_or_notify_cancel():  # nobody waits for it any more
                continue
            try:
                worker, result = self._grade(worker, task)
                future.set_result(result)
            except Exception as error:
                worker = None
                future.set_exception(error)
        if worker is not None:
            self._end(worker)

    def _grade(self, worker: _GraderProcess | None, task: list[str]) -> tuple[_GraderProcess | None, Any]:
        """Runs one task. Returns the process to continue with, and the result.

        A process that is gone may have been killed from outside or by this task: a second try shows which.
        """
        for _ in range(2):
            if worker is not None and worker.process.poll() is not None:  # killed while it had nothing to do
                self._drop(worker)
                worker = None
            try:
                worker = worker or self._start()
                result = worker.grade(task, self.deadline_s, self._call_bytes)
                if worker.leaks():
                    print(
                        f"rewards: a grader's memory grew by {LEAK_BYTES >> 30} GiB: replaced",
                        file=sys.stderr,
                    )
                    self._drop(worker)
                    return None, result
                return worker, result
            except PoolClosed:
                return None, ["error", 0.0, "the run ended", {}]
            except TimeoutError:
                self._drop(worker)
                return None, [
                    "timeout",
                    0.0,
                    f"no result within rewards.deadline_s {self.deadline_s:g} s",
                    {},
                ]
            except TaskTooLarge as error:
                print(f"rewards: {error}", file=sys.stderr, flush=True)
                self._drop(worker)
                return None, ["error", 0.0, str(error), {}]
            except (OSError, EOFError):
                self._drop(worker)
                worker = None
        return None, ["error", 0.0, "the grader's process ended twice on it: memory, or a crash", {}]

    def _drop(self, worker: _GraderProcess | None) -> None:
        if worker is not None:
            with self._lock:
                self.restarts += 1
            self._end(worker)

    def _end(self, worker: _GraderProcess) -> None:
        worker.kill()
        worker.end()
        with self._lock:
            self._processes.discard(worker)

    def _start(self) -> _GraderProcess:
        """A new process that is ready for tasks. Raises Closed, or ConfigError if none can be started."""
        for _ in range(START_ATTEMPTS):
            with self._lock:
                if self._closed:
                    raise PoolClosed
                worker = _GraderProcess(self._loads, MEMORY_BYTES // self._workers)
                self._processes.add(worker)
            try:
                if not worker.connection.poll(START_TIMEOUT_S):
                    raise EOFError
                state, message = json.loads(worker.connection.recv_bytes())
            except (OSError, EOFError):  # killed while it started
                self._end(worker)
                continue
            if state != "ready":
                self._end(worker)
                kind = LacksModule if state == "lacks" else ConfigError
                raise kind(" ".join(message.split()))
            worker.pid = message["pid"]
            worker.wants_ids = message["wants_ids"]
            return worker
        if self._closed:
            raise PoolClosed
        raise ConfigError(
            f"no grading process started in {START_ATTEMPTS} attempts: see the messages above, and check the "
            "node's free memory and rewards.function"
        )


class _GraderProcess(GuardedProcess):
    """A process that grades, and the connection to it."""

    def __init__(self, loads: tuple[str, str], memory_bytes: int):
        super().__init__(
            "trainer.rewards.pool_worker",
            [str(memory_bytes), *loads],
            kept=bool(loads[0]),
            what="rewards: a grader",
        )
        self.wants_ids = False
        self._first_bytes = 0

    def leaks(self) -> bool:
        """Whether it has gained more than LEAK_BYTES since its first result."""
        held = self.held_bytes
        self._first_bytes = self._first_bytes or held
        return held - self._first_bytes > LEAK_BYTES

    def grade(self, task: list[str], deadline_s: float, most_bytes: int) -> Any:
        """Result of a task. Raises as `ask`, and TaskTooLarge instead of TookTooMuch."""
        try:
            return json.loads(self.ask(json.dumps(task).encode(), deadline_s, most_bytes))
        except TookTooMuch as error:
            raise TaskTooLarge(
                f"one call of the function took {error}, more than the {most_bytes / 2**30:.1f} that a"
                " grader may: ended, counted as an error; lower rewards.workers, or what the function takes;"
                f" completion {task[1][-80:]!a}"
            ) from None
