"""A first reply that is not right is told so, once, and may be mended. See docs/turns.md.

    --set turns.environment=examples/second_try.py:Again

Only what the built-in grader decides at once is told: leave `rewards.function`, `rewards.judge_url` and
`rewards.remote_url` empty, and train, since a benchmark's answers are told too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.turns.episode import Observation, Situation

WRONG = "That is not right. Look again, find the mistake, and answer once more."
NO_ANSWER = "No final answer was found in your reply. Answer once more, in the form that was asked for."
_TWO_TEXT = "yes no true false left right up down male female man woman boy girl"
_TWO = frozenset(_TWO_TEXT.split())
_ALTERNATIVES = re.compile(r"\bor\b", re.IGNORECASE)


class Again:
    """Nothing is told of an answer that is one of a few (a letter, yes or no): to one who is told that the
    first was wrong, the second is worth less than it earns."""

    def answer(self, situation: Situation, replies: Sequence[str]) -> Observation | None:
        """What comes back for a first reply that is wrong or has no answer."""
        if len(replies) > 1:
            return None
        match situation.verdict(replies[0]):
            case "wrong" if not _leaves_few(situation.row):
                return Observation(WRONG, role="user")
            case "no_answer":
                return Observation(NO_ANSWER, role="user")
        return None


def _leaves_few(row: Mapping[str, Any]) -> bool:
    """Whether a row's answer is one of at most a handful that its question leaves open."""
    reference = str(row.get("reference", "")).strip(" .").casefold()
    question = str(row.get("question", ""))
    one_of_named = reference in question.casefold() and _ALTERNATIVES.search(question) is not None
    is_word = row.get("answer_type") == "text" and one_of_named
    return row.get("answer_type") == "letter" or reference in _TWO or is_word
