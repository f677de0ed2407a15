"""A first reply that is not right is told so, once, and may be mended."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.turns.episode import Environment, Observation, Situation

WRONG = "That is not right. Look again, find the mistake, and answer once more."
NO_ANSWER = "No final answer was found in your reply. Answer once more, in the form that was asked for."


class Again(Environment):
    """What the grader must evaluate an expression for is not told: it is graded later."""

    def answer(self, situation: Situation, replies: Sequence[str]) -> Observation | None:
        """`Environment.answer`."""
        if len(replies) > 1:
            return None
        match situation.verdict(replies[0]):
            case "wrong":
                return Observation(WRONG, role="user")
            case "no_answer":
                return Observation(NO_ANSWER, role="user")
        return None
