"""What grades in a process of its own (trainer/system/answering_process.py): tasks and results are JSON."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from typing import Any

from trainer.rewards.functions import LoadedFunction, load_all, rewards_of

MOST_TOLD = 5
"""Different failures that a process prints; the metrics count all of them."""


def grade_task(task: list[str], functions: Sequence[LoadedFunction]) -> list[Any]:
    """Runs one task and returns [verdict or message, number], and for "user" also [why, parts],
    for "grade" [why, parts, rule].

    The tasks are ["grade", box, reference, answer type, question], ["reference", reference, answer
    type, question] and ["user", text, facts as JSON].
    """
    from trainer.rewards.grading import grader

    match task:
        case ["grade", *arguments]:
            verdict, rule = grader.judge(*arguments)  # ty: ignore[invalid-argument-type]
            return [verdict, float(verdict == "correct"), "", {}, rule or ""]
        case ["reference", *arguments]:
            return [grader.reference_error(*arguments), 0.0]  # ty: ignore[invalid-argument-type]
        case ["user", text, facts]:
            return rewards_of(functions, json.loads(facts) | {"text": text})
    raise ValueError(f"unknown task {task[0]!r}")


class Graders:
    """An `Answerer` of tasks."""

    def __init__(self, memory_bytes: str, specs: str) -> None:
        """memory_bytes: address space without users' functions. specs: those, as `functions.load_all` reads
        them; may be empty. Raises OwnFileError."""
        self.functions = load_all(specs) if specs else []
        if not self.functions:  # a user's file may need any amount of address space
            from trainer.rewards.grading import grader

            grader.decide("x + 1", "1 + x", "math")  # loads what the first task would wait for
            resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
        self.about = {"wants_ids": any(function.asking.wants_ids for function in self.functions)}
        self._shown: set[str] = set()

    def answer(self, message: bytes) -> bytes:
        """`Answerer.answer`."""
        task = json.loads(message)
        try:
            result = grade_task(task, self.functions)
        except RecursionError:
            result = ["wrong", 0.0] if task[0] == "grade" else ["error", 0.0]
        except Exception as error:
            if self.functions:  # none of theirs: they broke this process, and the next one asks again
                raise
            reason = " ".join(str(error).split())[:300]
            result = ["error", 0.0, f"{type(error).__name__}: {reason}", {}]
        why = str(result[2]) if len(result) > 2 else ""
        if why and why not in self._shown and len(self._shown) < MOST_TOLD:
            self._shown.add(why)
            print(f"grading {task[1][:200]!a} failed: {why}", file=sys.stderr)
        return json.dumps(result).encode()
