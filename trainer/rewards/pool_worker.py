"""A process that grades, one task at a time.

    python -m trainer.rewards.pool_worker FD PARENT MEMORY USER_FUNCTION TASK_PACKAGES

The last two are empty or say what the process loads before its first task.

Tasks and results are JSON messages over the connection FD. When the trainer dies, even by SIGKILL in
the middle of a task, the kernel kills this process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainer.processes import end_with_parent

UserFunction = Callable[[str, str, str], Any]


def load_function(spec: str) -> UserFunction:
    """The function of `path/to/file.py:function`. Raises ValueError that says what is wrong with it."""
    path, _, name = spec.rpartition(":")
    if not path or not Path(path).is_file():
        raise ValueError(
            f"rewards.function {spec!r}: write path/to/file.py:function, with a file that exists"
        )
    module_spec = importlib.util.spec_from_file_location("user_reward", path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"rewards.function: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"rewards.function: {path} has no function {name!r}")
    return function


def grade_task(task: list[str], function: UserFunction | None) -> list[Any]:
    """Runs one task and returns [verdict or message, number].

    The tasks are ["grade", box, reference, answer type, question], ["reference", reference, answer
    type, question], ["published", benchmark, text, reference, fields as JSON, form] and ["user", text,
    reference, answer type]. Those of the type `task` are their family's.
    """
    from trainer.rewards import families
    from trainer.rewards.grading import grader, published

    match task:
        case ["grade", answer, reference, "task", _]:
            value = families.score(answer, reference)
            return ["correct" if value >= families.CORRECT else "wrong", value]
        case ["reference", reference, "task", _]:
            return [families.fault(reference), 0.0]
        case ["grade", *arguments]:
            verdict = grader.decide(*arguments)  # ty: ignore[invalid-argument-type]
            return [verdict, float(verdict == "correct")]
        case ["reference", *arguments]:
            return [grader.reference_error(*arguments), 0.0]  # ty: ignore[invalid-argument-type]
        case ["published", benchmark, text, reference, fields, form]:
            return ["", published.score(benchmark, text, reference, json.loads(fields), form)]
        case ["user", *arguments] if function is not None:
            value = float(function(*arguments))
            if not math.isfinite(value):
                return ["error", value]
            return ["correct" if value > 0 else "wrong", value]
    raise ValueError(f"unknown task {task[0]!r}")


def work(connection: Connection, memory_bytes: int, user_function: str, task_packages: str) -> None:
    """Sends `ready`, then a result for each task, until the other side closes the connection."""
    function = None
    try:
        function = load_function(user_function) if user_function else None
        if task_packages:
            from trainer.rewards import families

            families.load(Path(task_packages))
    except BaseException as error:
        connection.send_bytes(json.dumps(["failed", f"{type(error).__name__}: {error}"]).encode())
        return
    # A user's file may need any amount of memory.
    if function is None:
        from trainer.rewards.grading import grader

        grader.decide("x + 1", "1 + x", "math")  # loads what the first task would wait for
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    connection.send_bytes(json.dumps(["ready", ""]).encode())
    while True:
        task = json.loads(connection.recv_bytes())
        try:
            result = grade_task(task, function)
        except RecursionError:
            result = ["wrong", 0.0] if task[0] == "grade" else ["error", 0.0]
        except Exception as error:
            print(f"grading {task[1][:200]!a} failed: {type(error).__name__}: {error}", file=sys.stderr)
            result = ["error", 0.0]
        connection.send_bytes(json.dumps(result).encode())


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor, parent, memory_bytes, user_function, task_packages = sys.argv[1:]
    end_with_parent(int(parent))
    with contextlib.suppress(EOFError, OSError):
        work(Connection(int(descriptor)), int(memory_bytes), user_function, task_packages)


if __name__ == "__main__":
    main()
