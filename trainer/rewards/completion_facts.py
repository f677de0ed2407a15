"""What a user's reward functions may ask for besides the completion, and which functions there are, as JSON
for the grader processes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.config import ConfigError, RewardFunction
from trainer.rewards.grade import grade_of
from trainer.rewards.process_pool import ProcessPool

UNKNOWN = {"id": "", "source": "", "solution": "", "image_count": 0, "extra": {}}
"""The facts of a row that nobody stated."""


def facts_of(reference: str, answer_type: str, question: str, row: Mapping[str, Any]) -> str:
    """The facts of one completion, as JSON.

    row: as UNKNOWN, and `completion_ids`, its token ids, where a function wants them. extra: the row's other
    columns.
    """
    facts = UNKNOWN | dict(row) | {"reference": reference, "answer_type": answer_type, "question": question}
    facts["solution"] = facts["solution"] or reference
    return json.dumps(facts, sort_keys=True)


def function_specs(functions: Sequence[RewardFunction]) -> str:
    """The functions for a grader process (`functions.load_all`); empty where there are none."""
    specs = [asdict(function) | {"name": function.metric} for function in functions]
    return json.dumps(specs) if specs else ""


def try_functions(pool: ProcessPool, text: str, facts: str, named: str) -> None:
    """Calls the functions of a pool for one completion. Raises ConfigError that names exception and line."""
    grade = grade_of(pool.submit(["user", text, facts]).result(), named)
    if grade.verdict in ("timeout", "error"):
        raise ConfigError(f"{grade.why} (called for one row, before the run)")


def sample_completion(reference: str) -> str:
    """A completion that states an answer in every form that looks for a box."""
    return f"<think>A thought.</think><answer>$\\boxed{{{reference}}}$</answer>"
