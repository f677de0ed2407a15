"""What the grader says of a reply at once."""

from __future__ import annotations

import pytest

from trainer.config import Rewards
from trainer.data.schema import Row
from trainer.rewards.verdict_at_once import quick_verdict

TWO_BOXES = "<think> a </think><answer> $\\boxed{3}$ $\\boxed{4}$ </answer>"


@pytest.mark.parametrize(
    ("answer", "kind", "reply", "verdict"),
    [
        ("3", "number", "<think> a </think><answer> $\\boxed{3}$ </answer>", "correct"),
        ("3", "number", "<think> a </think><answer> $\\boxed{3.0}$ </answer>", "correct"),
        ("3", "number", "<think> a </think><answer> $\\boxed{4}$ </answer>", "wrong"),
        ("3", "number", TWO_BOXES, "wrong"),
        ("3", "number", "It is 3.", "no_answer"),
        ("B", "letter", "<think> a </think><answer> $\\boxed{A}$ </answer>", "wrong"),
        ("2 \\sqrt{2}", "math", "<think> a </think><answer> $\\boxed{\\sqrt{8}}$ </answer>", None),
    ],
)
def test_what_needs_no_evaluation_is_told_at_once(answer, kind, reply, verdict):
    row = Row("a", "s", [{"role": "user", "content": "What is it?"}], [], answer, kind)
    assert quick_verdict(Rewards(), row, reply) == verdict
