"""Calls a run's own code, its reward functions and its environment, on one row: at the desk, before anything
is rented, and at the start of the run.

    python -m trainer.rewards.trial < run.json       -> {"refused": "...", "notes": ["...", ...]}

run.json: {"rewards", "turns": the sections, "data": folder of the prepared rows or "", "split": its split}.
The row is the first of the dataset where that is on this machine, else a made-up one, of which code may ask
for columns that nobody here knows. All is called twice in one process: much works once only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config import Rewards, Turns, from_dict
from trainer.data.schema import Row, question_text
from trainer.rewards.completion_facts import facts_of, facts_of_row, function_specs, sample_completion
from trainer.rewards.grade import grade_of
from trainer.rewards.process_pool import ProcessPool
from trainer.system.errors import ConfigError
from trainer.system.process_set import LacksModule

OF_THE_ROW = (
    *("ValueError", "JSONDecodeError", "KeyError", "IndexError", "ZeroDivisionError", "AssertionError"),
)
"""What sound code may raise on a row that is none of the run's."""
CALLS = 2


@dataclass(frozen=True)
class TrialRow:
    """What code is called for."""

    reference: str = "4"
    answer_type: str = "number"
    question: str = "How many sides has a square?"
    facts: dict[str, Any] = field(default_factory=dict)
    """As `completion_facts.UNKNOWN`."""
    images: tuple[bytes, ...] = ()
    name: str = ""
    """Which row it is; "" for a made-up one."""


def try_at_start(rewards: Rewards, turns: Turns, row: Row) -> None:
    """Raises ConfigError where a run's own code fails on a row of its own."""
    for trial in _trials(rewards, turns, trial_row(row)):
        if fault := trial():
            raise ConfigError(f"{fault}, called for row {row.id} before the run")


def try_at_desk(rewards: Rewards, turns: Turns, data: str, split: str) -> dict[str, Any]:
    """What is wrong with a run's own code, and what could not be told here."""
    row = first_row(data, split)
    notes = []
    for trial in _trials(rewards, turns, row):
        try:
            fault = trial()
        except LacksModule as error:
            notes.append(f"{error}: not on this machine, so the node is the first to call it")
            continue
        except ConfigError as error:
            return {"refused": str(error), "notes": []}
        if not fault:
            continue
        if row.name:
            return {"refused": f"{fault}, called for {row.name}", "notes": []}
        made_up = f"{fault}, called for a made-up row: the run's rows are not on this machine"
        if not any(f": {kind}: " in fault for kind in OF_THE_ROW):
            return {"refused": f"{made_up}; a column of theirs needs a default", "notes": []}
        notes.append(made_up)
    return {"refused": "", "notes": notes}


def _trials(rewards: Rewards, turns: Turns, row: TrialRow) -> list[Callable[[], str]]:
    trials = []
    if rewards.own:
        trials.append(partial(fault_of_functions, rewards, row))
    if turns.own:
        trials.append(partial(fault_of_environment, turns, row))
    return trials


def fault_of_functions(rewards: Rewards, row: TrialRow) -> str:
    """What became of a call of the reward functions; "" if they gave a number. Raises ConfigError."""
    pool = ProcessPool(1, rewards.deadline_s, function_specs(rewards.own), env=rewards.env)
    names = " + ".join(function.path for function in rewards.own)
    try:
        facts = row.facts | ({"completion_ids": list(range(8))} if pool.check() else {})
        about = facts_of(row.reference, row.answer_type, row.question, facts)
        for call in range(CALLS):
            result = pool.submit(["user", sample_completion(row.reference), about]).result()
            grade = grade_of(result, f"rewards.function {names}")
            if grade.verdict in ("timeout", "error") or grade.accuracy != grade.accuracy:
                fault = grade.why or f"rewards.function {names}: it returned {grade.accuracy}"
                return fault + _which_call(call)
    finally:
        pool.close()
    return ""


def fault_of_environment(turns: Turns, row: TrialRow) -> str:
    """What became of a call of the environment; "" if it answered. Raises ConfigError."""
    from PIL import Image

    from trainer.images.decoding import decode_image
    from trainer.turns.episode import SeenPicture, Situation
    from trainer.turns.own_environment import OwnEnvironment, ToolFailure

    environment = OwnEnvironment(turns)
    try:
        pictures = []
        if environment.shows_images:
            images = [decode_image(data, row.name) for data in row.images] or [Image.new("RGB", (224, 224))]
            pictures = [SeenPicture(image, image.size) for image in images]
        about = {"reference": row.reference, "answer_type": row.answer_type, "question": row.question}
        facts = {"id": "", "source": "", "extra": {}} | row.facts | about
        situation = Situation(pictures, lambda reply: "wrong", row=facts)
        replies = [sample_completion(row.reference)]
        for call in range(CALLS):
            try:
                environment.answer_or_fail(situation, replies)
                if environment.scores:
                    environment.score_or_fail(situation, replies)
            except ToolFailure as failure:
                key = f"turns.environment {turns.environment}: "
                return (
                    key
                    + failure.fault.removeprefix(f"turns.environment {environment.path}: ")
                    + _which_call(call)
                )
    finally:
        environment.processes.close()
    return ""


def _which_call(call: int) -> str:
    return f" (at call {call + 1} in one process)" if call else ""


def first_row(data: str, split: str) -> TrialRow:
    """The first row of prepared data on this machine, or a made-up one."""
    if not data or not (Path(data).expanduser() / "manifest.json").is_file():
        return TrialRow()
    try:
        from trainer.data.dataset import Dataset
    except ImportError:  # a desk without pyarrow
        return TrialRow()
    row = trial_row(Dataset(Path(data).expanduser(), split)[0])
    return replace(row, name=f"{row.name} of {data}")


def trial_row(row: Row) -> TrialRow:
    """What code is called for, of a row."""
    facts = facts_of_row(row)
    question = question_text(row.messages)
    return TrialRow(row.answer, row.answer_type, question, facts, tuple(row.images), f"row {row.id}")


def main() -> None:
    given = json.load(sys.stdin)
    rewards, turns = (from_dict(kind, given[name]) for kind, name in ((Rewards, "rewards"), (Turns, "turns")))
    try:
        answer = try_at_desk(rewards, turns, given["data"], given["split"])
    except ConfigError as error:
        answer = {"refused": str(error), "notes": []}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
