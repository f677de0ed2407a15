"""What a user's reward functions may ask for besides the completion, and which functions there are, as JSON
for the grader processes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.config import RewardFunction
from trainer.data.schema import Row

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


def facts_of_row(row: Row) -> dict[str, Any]:
    """What a row says, as UNKNOWN."""
    return {
        "id": row.id,
        "source": row.source,
        "solution": row.solution,
        "image_count": len(row.images),
        "extra": row.extra,
    }


def function_specs(functions: Sequence[RewardFunction]) -> str:
    """The functions for a grader process (`functions.load_all`); empty where there are none."""
    specs = [asdict(function) | {"name": function.metric} for function in functions]
    return json.dumps(specs) if specs else ""


def sample_completion(reference: str) -> str:
    """A completion that states an answer in every form that looks for a box."""
    return f"<think>A thought.</think><answer>$\\boxed{{{reference}}}$</answer>"
