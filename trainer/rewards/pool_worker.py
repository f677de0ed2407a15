"""A process that grades, one task at a time.

    python -m trainer.rewards.pool_worker FD PARENT MEMORY FUNCTIONS TASK_PACKAGES

The last two are empty or say what the process loads before its first task.

Tasks and results are JSON messages over the connection FD. When the trainer dies, even by SIGKILL in
the middle of a task, the kernel kills this process, and a keeper what a user's function started.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainer.rewards.functions import LoadedFunction, load_all, rewards_of
from trainer.system.own_file import OwnFileError
from trainer.system.process_keeper import run_under_keeper
from trainer.system.processes import end_with_parent

MOST_TOLD = 5
"""Different failures that a process prints; the metrics count all of them."""


def grade_task(task: list[str], functions: Sequence[LoadedFunction]) -> list[Any]:
    """Runs one task and returns [verdict or message, number], and for "user" also [why, parts],
    for "grade" [why, parts, rule].

    The tasks are ["grade", box, reference, answer type, question], ["reference", reference, answer
    type, question], ["published", benchmark, text, reference, fields as JSON, form] and ["user", text,
    facts as JSON]. Those of the type `task` are their family's.
    """
    from trainer.rewards import task_families
    from trainer.rewards.grading import grader, published

    match task:
        case ["grade", answer, reference, "task", _]:
            value = task_families.score_answer(answer, reference)
            return ["correct" if value >= task_families.CORRECT else "wrong", value]
        case ["reference", reference, "task", _]:
            return [task_families.task_fault(reference), 0.0]
        case ["grade", *arguments]:
            verdict, rule = grader.judge(*arguments)  # ty: ignore[invalid-argument-type]
            return [verdict, float(verdict == "correct"), "", {}, rule or ""]
        case ["reference", *arguments]:
            return [grader.reference_error(*arguments), 0.0]  # ty: ignore[invalid-argument-type]
        case ["published", benchmark, text, reference, fields, form]:
            return ["", published.score(benchmark, text, reference, json.loads(fields), form)]
        case ["user", text, facts]:
            return rewards_of(functions, json.loads(facts) | {"text": text})
    raise ValueError(f"unknown task {task[0]!r}")


def serve_tasks(connection: Connection, memory_bytes: int, specs: str, task_packages: str) -> None:
    """Sends `ready`, then a result for each task, until the other side closes the connection."""
    functions: list[LoadedFunction] = []
    try:
        functions = load_all(specs) if specs else []
        if task_packages:
            from trainer.rewards import task_families

            task_families.load_families(Path(task_packages))
    except BaseException as error:
        named = "" if isinstance(error, OwnFileError) else f"{type(error).__name__}: "
        missing = isinstance(error.__cause__, ModuleNotFoundError)
        state = "lacks" if missing else "failed"
        connection.send_bytes(json.dumps([state, f"{named}{error}"]).encode())
        return
    # A user's file may need any amount of memory.
    if not functions:
        from trainer.rewards.grading import grader

        grader.decide("x + 1", "1 + x", "math")  # loads what the first task would wait for
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    wants_ids = any(function.asking.wants_ids for function in functions)
    connection.send_bytes(json.dumps(["ready", {"pid": os.getpid(), "wants_ids": wants_ids}]).encode())
    told = set[str]()
    while True:
        task = json.loads(connection.recv_bytes())
        try:
            result = grade_task(task, functions)
        except RecursionError:
            result = ["wrong", 0.0] if task[0] == "grade" else ["error", 0.0]
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            result = ["error", 0.0, f"{type(error).__name__}: {said}", {}]
        why = str(result[2]) if len(result) > 2 else ""
        if why and why not in told and len(told) < MOST_TOLD:
            told.add(why)
            print(f"grading {task[1][:200]!a} failed: {why}", file=sys.stderr)
        connection.send_bytes(json.dumps(result).encode())


def main() -> None:
    descriptor, parent, memory_bytes, specs, task_packages = sys.argv[1:]

    def body() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(EOFError, OSError):
            serve_tasks(Connection(int(descriptor)), int(memory_bytes), specs, task_packages)

    if specs:
        run_under_keeper(int(parent), int(descriptor), body)
    end_with_parent(int(parent))
    body()


if __name__ == "__main__":
    main()
