"""A reward of your own: `--set rewards.function=examples/reward.py:reward`. See docs/rewards.md.

A number within 10% of the reference earns half; all else is the built-in grader's.
"""

from __future__ import annotations

from trainer.data.schema import AnswerType
from trainer.rewards.grading import grader
from trainer.rewards.grading.extraction import final_answer

NEAR, PARTIAL = 0.1, 0.5


def reward(text: str, reference: str, answer_type: AnswerType) -> float:
    """text: the whole completion. reference: what stands in the reference answer's box. answer_type: letter,
    number, text or math. It runs in a process of its own under `rewards.deadline_s`; an exception is an
    `error`."""
    answer, hedged = final_answer(text)
    if answer is None or hedged:
        return 0.0
    if grader.decide(answer, reference, answer_type) == "correct":
        return 1.0
    if answer_type == "number":
        try:
            said, wanted = float(answer), float(reference)
        except ValueError:
            return 0.0
        return PARTIAL if abs(said - wanted) <= NEAR * abs(wanted) else 0.0
    return 0.0


def repetition(completion_ids: list[list[int]]) -> list[float]:
    """Minus the share of a completion's 40-grams of tokens that stood before (arXiv 2502.03373), to be set
    beside another function: `rewards.functions=[{path: …:reward}, {path: …:repetition, weight: 0.5}]`."""
    (ids,) = completion_ids
    total = len(ids) - 40 + 1
    if total < 1:
        return [0.0]
    return [len({tuple(ids[start : start + 40]) for start in range(total)}) / total - 1]
