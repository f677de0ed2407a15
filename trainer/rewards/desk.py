"""Calls a run's reward functions on one row at the desk, before anything is rented.

    python -m trainer.rewards.desk < run.json        -> {"refused": "...", "notes": ["...", ...]}

run.json: {"rewards": the section, "data": folder of the prepared rows or "", "split": its split}. The row is
the first of the dataset where that is on this machine, else a made-up one, of which a function may ask for
columns that nobody here knows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from trainer.config import Rewards, from_dict
from trainer.rewards.completion_facts import facts_of, function_specs, sample_completion
from trainer.rewards.grade import grade_of
from trainer.rewards.process_pool import ProcessPool
from trainer.system.errors import ConfigError
from trainer.system.process_set import LacksModule

MADE_UP = "4", "number", "How many sides has a square?"
"""Reference answer, its type and question of a row that is nobody's."""
OF_THE_ROW = (
    *("ValueError", "JSONDecodeError", "KeyError", "IndexError", "ZeroDivisionError", "AssertionError"),
)
"""What a sound function may raise on a row that is none of the run's."""


def try_rewards_at_desk(rewards: Rewards, data: str, split: str) -> dict[str, Any]:
    """What is wrong with the functions, and what could not be told here."""
    about, row, whose = _first_row(data, split)
    pool = ProcessPool(1, rewards.deadline_s, function_specs(rewards.own))
    try:
        wants_ids = pool.check()
        facts = facts_of(*about, row | ({"completion_ids": list(range(8))} if wants_ids else {}))
        names = " + ".join(function.path for function in rewards.own)
        result = pool.submit(["user", sample_completion(about[0]), facts]).result()
    except LacksModule as error:
        return {
            "refused": "",
            "notes": [f"{error}: not on this machine, so the node is the first to call it"],
        }
    except ConfigError as error:
        return {"refused": str(error), "notes": []}
    finally:
        pool.close()
    grade = grade_of(result, f"rewards.function {names}")
    if grade.verdict in ("timeout", "error") or grade.accuracy != grade.accuracy:
        said = grade.why or f"rewards.function {names}: it returned {grade.accuracy}"
        if whose:
            return {"refused": f"{said}, called for {whose}", "notes": []}
        made_up = f"{said}, called for a made-up row: the run's rows are not on this machine"
        if any(f": {kind}: " in said for kind in OF_THE_ROW):
            return {"refused": "", "notes": [made_up]}
        return {"refused": f"{made_up}; a column of theirs needs a default", "notes": []}
    return {"refused": "", "notes": []}


def _first_row(data: str, split: str) -> tuple[tuple[str, str, str], dict[str, Any], str]:
    """(reference, type, question), the row's other facts, and which row it is; "" for a made-up one."""
    if not data or not (Path(data).expanduser() / "manifest.json").is_file():
        return MADE_UP, {}, ""
    try:
        from trainer.data.dataset import Dataset
        from trainer.data.schema import TASK, question_text
    except ImportError:  # a desk without pyarrow
        return MADE_UP, {}, ""
    row = Dataset(Path(data).expanduser(), split)[0]
    facts = {
        "id": row.id,
        "source": row.source,
        "solution": row.solution,
        "image_count": len(row.images),
        "extra": {name: value for name, value in row.extra.items() if name != TASK},
    }
    return (row.reference, row.answer_type, question_text(row.messages)), facts, f"row {row.id} of {data}"


def main() -> None:
    asked = json.load(sys.stdin)
    try:
        told = try_rewards_at_desk(from_dict(Rewards, asked["rewards"]), asked["data"], asked["split"])
    except ConfigError as error:
        told = {"refused": str(error), "notes": []}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
