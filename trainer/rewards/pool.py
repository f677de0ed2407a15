"""`Rewards`: grades batches of answers; can neither hang nor lose a batch to one answer.

Letters, numbers and words are decided in the calling process, by form and in bounded time. What needs algebra, and
every user function, runs in worker processes that are killed and replaced at a deadline, one answer at a time.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from trainer import config as configuration
from trainer.config import ConfigError
from trainer.records import Outcome, Verdict
from trainer.rewards import grader, remote
from trainer.rewards.extraction import final_answer, format_reward
from trainer.rewards.worker import receive, send

START_TIMEOUT_S = 120.0
"""For a process to import math-verify or the user's file; a node under load takes its time."""
MAX_REMEMBERED = 100_000
"""Verdicts of algebra kept, so that a group's equal answers are worked out once."""

MAX_STRETCH = 4.0
"""No answer may take longer than this many deadlines, however busy the node is."""

Graded = tuple[Verdict, float]


class TimeoutRateError(RuntimeError):
    """More answers of one batch timed out than `rewards.max_timeout_rate` allows."""


class Rewards:
    """Grades answers against their labels.

    Thread-safe. Holds no process before the first answer that needs one, unless a user function must be checked.

    Raises:
        ConfigError: the user function cannot be loaded, or function and remote_url are both set.
    """

    def __init__(self, config: configuration.Rewards):
        if config.function and config.remote_url:
            raise ConfigError("rewards.function and rewards.remote_url are both set: unset one")
        self.config = config
        self._remote = remote.Client(config) if config.remote_url else None
        self._pool = Pool(config.workers, config.deadline_s, config.function)
        self._known: dict[tuple[str, str, str], Verdict] = {}
        self._last: dict[str, float] = {}
        if config.function:
            self._pool.check()

    def score(self, texts: Sequence[str], golds: Sequence[str], answer_types: Sequence[str]) -> list[Outcome]:
        """Grades a batch; `texts[i]` against `golds[i]` by route `answer_types[i]`. Order is kept.

        Raises:
            ValueError: the lists differ in length.
            TimeoutRateError: too many of these answers timed out.
            ConnectionError: a remote grader cannot be reached.
        """
        if not len(texts) == len(golds) == len(answer_types):
            raise ValueError(f"{len(texts)} texts, {len(golds)} golds, {len(answer_types)} types: lengths must agree")
        if self._remote is not None:
            graded, slow = self._remote.grade(texts, golds, answer_types), 0
        else:
            graded, slow = self._grade(texts, golds, answer_types)
        weights = self.config.accuracy_weight, self.config.format_weight
        outcomes = []
        for text, (verdict, accuracy) in zip(texts, graded, strict=True):
            form = format_reward(text)
            outcomes.append(Outcome(verdict, accuracy, form, weights[0] * accuracy + weights[1] * form))
        self._count(outcomes, slow)
        return outcomes

    def gold_errors(self, golds: Sequence[str], answer_types: Sequence[str]) -> list[str | None]:
        """`grader.gold_error` for each gold answer, under the deadline."""
        futures = [self._pool.submit(["gold", g, t]) for g, t in zip(golds, answer_types, strict=True)]
        errors: list[str | None] = []
        for gold, future in zip(golds, futures, strict=True):
            message, _ = future.result()
            failed = message in ("timeout", "error")
            errors.append(f"gold answer {gold[:80]!r}: parsing ended in {message}" if failed else message)
        return errors

    def stats(self) -> dict[str, float]:
        """Shares of the last batch by verdict, and how many workers had to be replaced since the start."""
        return {**self._last, "perf/grader_restarts": float(self._pool.restarts)}

    def close(self) -> None:
        """Ends all processes."""
        self._pool.close()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grade(
        self, texts: Sequence[str], golds: Sequence[str], answer_types: Sequence[str]
    ) -> tuple[list[Graded], int]:
        graded: list[Graded | None] = [None] * len(texts)
        waiting: dict[tuple[str, ...], list[int]] = {}
        for i, row in enumerate(zip(texts, golds, answer_types, strict=True)):
            if self.config.function:
                waiting.setdefault(("user", *row), []).append(i)
                continue
            content, hedged = final_answer(row[0])
            verdict: Verdict | None = "no_answer"
            if content is not None:
                verdict = grader.decide_fast("" if hedged else content, row[1], row[2])  # ty: ignore[invalid-argument-type]
            if verdict is not None:
                graded[i] = (verdict, float(verdict == "correct"))
            else:
                waiting.setdefault(("grade", content or "", row[1], row[2]), []).append(i)
        futures = {task: self._pool.submit(list(task)) for task in waiting if task[1:] not in self._known}
        for task, members in waiting.items():
            if task in futures:
                result = futures[task].result()
                if task[0] == "grade" and result[0] in ("correct", "wrong"):
                    self._remember(task[1:], result[0])
            else:
                verdict = self._known[task[1:]]  # ty: ignore[invalid-argument-type]
                result = (verdict, float(verdict == "correct"))
            for i in members:
                graded[i] = (result[0], result[1])
        return [g for g in graded if g is not None], sum(map(len, waiting.values()))

    def _remember(self, key: tuple[str, ...], verdict: Verdict) -> None:
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[key] = verdict  # ty: ignore[invalid-assignment]

    def _count(self, outcomes: list[Outcome], slow: int) -> None:
        if not outcomes:
            return
        counts = Counter(o.verdict for o in outcomes)
        share = {v: counts[v] / len(outcomes) for v in ("timeout", "error", "no_answer")}
        self._last = {f"reward/{v}_rate": s for v, s in share.items()}
        self._last["reward/algebra_fraction"] = slow / len(outcomes)
        if share["timeout"] > self.config.max_timeout_rate:
            raise TimeoutRateError(
                f"{counts['timeout']} of {len(outcomes)} answers timed out in the grader, more than "
                f"rewards.max_timeout_rate {self.config.max_timeout_rate}: look at the samples, and raise it, or "
                f"rewards.deadline_s ({self.config.deadline_s} s) if the node is overloaded"
            )


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
        connection, _ = self._start()
        connection.close()

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
        worker: tuple[socket.socket, int] | None = None
        while (item := self._tasks.get()) is not None:
            task, future = item
            for last_try in (False, True):
                try:
                    worker = worker or self._start()
                    future.set_result(self._ask(*worker, task))
                    break
                except TimeoutError:
                    worker = self._replace(worker)
                    future.set_result(["timeout", 0.0])
                    break
                except (OSError, EOFError):  # killed from outside, or by its own answer: one more try tells
                    worker = self._replace(worker)
                    if last_try or self._closed:
                        future.set_result(["error", 0.0])
                        break
                except Exception as error:
                    future.set_exception(error)
                    break
        if worker is not None:
            worker[0].close()

    def _ask(self, connection: socket.socket, pid: int, task: list[str]) -> Any:
        """The worker's answer. Raises TimeoutError at the deadline, EOFError if the worker is gone.

        The clock stands still while the worker waits for a CPU, so that a busy node does not make wrong verdicts.
        """
        started, queued = time.monotonic(), _waited_for_cpu_s(pid)
        send(connection, task)
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        while True:
            elapsed = time.monotonic() - started
            left = self.deadline_s - elapsed + _waited_for_cpu_s(pid) - queued
            if left <= 0 or elapsed > MAX_STRETCH * self.deadline_s:
                raise TimeoutError
            if poll.poll(max(left, 0.01) * 1000):
                return receive(connection)

    def _replace(self, worker: tuple[socket.socket, int] | None) -> None:
        with self._lock:
            self.restarts += 1
            if worker is not None:
                worker[0].close()
                if self._nursery is not None:
                    self._nursery.kill(worker[1])

    def _start(self) -> tuple[socket.socket, int]:
        """A new worker that is ready for tasks: (its socket, its pid)."""
        with self._lock:
            if self._closed:
                raise EOFError("the grader is closed")
            if self._nursery is None or self._nursery.process.poll() is not None:
                self._nursery = _Nursery(self._function)
            connection, pid = self._nursery.fork()
        connection.settimeout(START_TIMEOUT_S)
        state, message = receive(connection)
        if state != "ready":
            connection.close()
            raise ConfigError(message.replace("\n", " "))
        connection.settimeout(self.deadline_s)
        return connection, pid


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
                [sys.executable, "-P", "-m", "trainer.rewards.worker", str(theirs.fileno()), function],
                pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.control.settimeout(START_TIMEOUT_S)
        if self.control.recv(1) != b"R":
            raise EOFError("the grader process did not start: see its message above")

    def fork(self) -> tuple[socket.socket, int]:
        """A new worker: (socket to it, its pid)."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.control, [struct.pack("!cq", b"F", 0)], [theirs.fileno()])
        return ours, struct.unpack("!q", self.control.recv(8))[0]

    def kill(self, pid: int) -> None:
        """Kills one worker; nothing happens if it is gone already."""
        try:
            self.control.sendall(struct.pack("!cq", b"K", pid))
        except OSError:
            return

    def close(self) -> None:
        """Ends the nursery and with it all workers."""
        self.control.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
