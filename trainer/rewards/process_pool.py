"""Tasks of graders (`pool_worker.py`), one at a time for each process, under a deadline."""

from __future__ import annotations

import json
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from trainer.hardware.host_memory import available_memory
from trainer.system.process_set import Crashed, Guard, ProcessSet, SetClosed, TookTooMuch, handed_on

MEMORY_BYTES = 4 << 30
"""Address space of all built-in graders together. A process needs 30 MiB to start."""
LEAK_BYTES = 1 << 30
"""Memory that a process with a user's function may gain after its first result, before it is replaced."""
CALLS_SHARE = 0.5
"""Share of the memory that is free at the start, for all that calls of a user's function take at once. One
that takes more than its process's part is ended: the kernel, or Ray, would end ranks instead."""


class ProcessPool:
    """Threads that each give a grader's process one task at a time."""

    def __init__(self, workers: int, deadline_s: float, functions: str = "", env: str = ""):
        """functions: a user's, as `functions.load_all` reads them. env: names of variables that they get."""
        self.deadline_s = deadline_s
        most_bytes = 0
        if functions:
            most_bytes = max(LEAK_BYTES, int(CALLS_SHARE * available_memory()) // workers)
        self.processes = ProcessSet(
            Guard(
                maker="trainer.rewards.pool_worker:Graders",
                arguments=[str(MEMORY_BYTES // workers), functions],
                key="rewards.function" if functions else "rewards: a grader",
                most_bytes=most_bytes,
                leak_bytes=LEAK_BYTES if functions else 0,
                environment=handed_on(env),
            )
        )
        self._threads = ThreadPoolExecutor(workers, "grader")
        self._closed = False

    def submit(self, task: list[str]) -> Future[Any]:
        """Queues a task of `pool_worker.grade_task`. It results in ["timeout", 0.0, why, {}] or ["error",
        0.0, why, {}] if it fails."""
        if self._closed:
            raise RuntimeError("the grader is closed")
        return self._threads.submit(self._grade, task)

    def check(self) -> bool:
        """Starts a process. Returns whether a user's function wants token ids.

        Raises ConfigError if the function cannot be loaded, LacksModule if its file wants a package that is
        not here.
        """
        return self.processes.about()["wants_ids"]

    @property
    def restarts(self) -> int:
        """Processes that were ended and replaced."""
        return self.processes.restarts

    def close(self) -> None:
        """Ends threads and processes; tasks that run or wait end as errors."""
        self._closed = True
        self.processes.close()
        self._threads.shutdown()

    def _grade(self, task: list[str]) -> list[Any]:
        """The result of one task, or what became of it."""
        try:
            return json.loads(self.processes.ask(json.dumps(task).encode(), self.deadline_s))
        except SetClosed:
            return ["error", 0.0, "the run ended", {}]
        except TimeoutError:
            return ["timeout", 0.0, f"no result within rewards.deadline_s {self.deadline_s:g} s", {}]
        except Crashed:
            return ["error", 0.0, "the grader's process ended twice on it: memory, or a crash", {}]
        except TookTooMuch as error:
            may_gib = self.processes.guard.most_bytes / 2**30
            why = (
                f"one call of the function took {error}, more than the {may_gib:.1f} that a"
                " grader may: ended, counted as an error; lower rewards.workers, or what the function takes;"
                f" completion {task[1][-80:]!a}"
            )
            print(f"rewards: {why}", file=sys.stderr, flush=True)
            return ["error", 0.0, why, {}]
