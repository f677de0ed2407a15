"""Processes that grade (`pool_worker.py`), one task at a time; a process is killed and replaced at a
deadline."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.hardware.host_memory import available_memory

START_TIMEOUT_S = 120.0
"""Time for a process to import the grader or the user's file on a busy node."""
START_ATTEMPTS = 3
MAX_STRETCH = 4.0
"""Number of deadlines that a task may take at most, however busy the node is."""
MEMORY_BYTES = 4 << 30
"""Address space of all built-in graders together. A process needs 30 MiB to start."""

OUTPUT_BYTES = 64 << 10
"""What one process may print; the rest is dropped, else a function that prints fills the run's log and
disk."""
LEAK_BYTES = 1 << 30
"""Memory that a process with a user's function may gain after its first result, before it is replaced."""
CALLS_SHARE = 0.5
"""Share of the memory that is free at the start, for all that calls of a user's function take at once. One
that takes more than its process's part is ended: the kernel, or Ray, would end ranks instead."""
END_S = 5.0
"""Longest wait for a keeper to end what its grader started."""
LOOK_S = 0.25
"""Between two looks at the memory of a process at work."""


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
                result = worker.ask(task, self.deadline_s, self._call_bytes)
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


class _GraderProcess:
    """A process that grades, and the connection to it."""

    def __init__(self, loads: tuple[str, str], memory_bytes: int):
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.connection, theirs = multiprocessing.Pipe()
        arguments = [str(theirs.fileno()), str(os.getpid()), str(memory_bytes), *loads]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trainer.rewards.pool_worker", *arguments],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid
        """Id of the process that grades; until it is ready, of the one that was started."""
        self.wants_ids = False
        self._kept = bool(loads[0])
        """Whether what was started is the grader's keeper, which ends all that the grader started."""
        self._first_bytes = 0
        threading.Thread(target=_forward, args=(self.process,), daemon=True, name="grader-output").start()

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

    def leaks(self) -> bool:
        """Whether it has gained more than LEAK_BYTES since its first result."""
        held = _memory_bytes(self.pid)
        self._first_bytes = self._first_bytes or held
        return held - self._first_bytes > LEAK_BYTES

    def ask(self, task: list[str], deadline_s: float, most_bytes: int = 0) -> Any:
        """Result of a task. Raises TimeoutError at the deadline, EOFError if the process is gone, TooLarge if
        it takes more than `most_bytes` for it (0: any amount).

        Time in which the process waits for a CPU does not count, so that a busy node causes no wrong
        verdicts.
        """
        started = time.monotonic()
        waited_before_s = _waited_for_cpu_s(self.pid)
        held_before = _memory_bytes(self.pid) if most_bytes else 0
        self.connection.send_bytes(json.dumps(task).encode())
        while True:
            elapsed = time.monotonic() - started
            waited_s = _waited_for_cpu_s(self.pid) - waited_before_s
            left = deadline_s - elapsed + waited_s
            if left <= 0 or elapsed > MAX_STRETCH * deadline_s:
                raise TimeoutError
            pause = min(left, LOOK_S) if most_bytes else left
            if self.connection.poll(max(pause, 0.01)):
                return json.loads(self.connection.recv_bytes())
            taken = _memory_bytes(self.pid) - held_before if most_bytes else 0
            if taken > most_bytes:
                raise TaskTooLarge(
                    f"one call of the function took {taken / 2**30:.1f} GiB, more than the"
                    f" {most_bytes / 2**30:.1f} that a grader may: ended, counted as an error; lower"
                    f" rewards.workers, or what the function takes; completion {task[1][-80:]!a}"
                )


def _forward(process: subprocess.Popen[bytes]) -> None:
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
                    print("\nrewards: a grader prints more; the rest is dropped", file=sys.stderr, flush=True)


def _memory_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _waited_for_cpu_s(pid: int) -> float:
    """Seconds that a process was ready to run and had no CPU (Linux); 0 if the kernel does not count them."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
