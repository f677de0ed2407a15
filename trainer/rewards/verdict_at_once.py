"""The built-in grader's verdict where no process is needed for it."""

from __future__ import annotations

from trainer.algorithm.traces import Verdict
from trainer.config import Rewards
from trainer.data.schema import Row, question_text
from trainer.rewards.grading.grader import decide_fast
from trainer.rewards.grading.stated_answers import FORMS


def quick_verdict(rewards: Rewards, row: Row, text: str) -> Verdict | None:
    """The verdict on a completion, in microseconds; None where something must be evaluated."""
    content, hedged = FORMS[rewards.answer].answer(text)
    if content is None:
        return "no_answer"
    return decide_fast("" if hedged else content, row.answer, row.answer_type, question_text(row.messages))
