r"""The forms in which completions state their answers: which answer counts, and the credit for the form.

    block   the last \boxed{} inside `<answer> </answer>`, after `<think> </think>`: our own prompt
    boxed   the last \boxed{} behind the reasoning, if that is marked: most published recipes
    final   what follows `####`, or "the answer is", in the last place that has it: GSM8K
    whole   all that stands behind the reasoning, one sentence: short answers, letters, equations
    any     the first of boxed and final that is there, else the last line: untrained models

Several different answers are a hedge, and wrong; so is more than `whole` asks for. All take linear time
on any text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from trainer.rewards.grading.extraction import (
    MAX_TEXT_CHARS,
    Found,
    boxed_contents,
    final_answer,
    format_reward,
    last_one,
    unbox,
    without_calls,
)

OPEN, CLOSE = "<think>", "</think>"
_MARKS = (re.compile(r"####"), re.compile(r"\banswer\s{0,3}(?:is|:|=)\s{0,3}:?", re.IGNORECASE))
"""What stands before a final answer; the first that a text has decides."""
_STOP = re.compile(r"[.!](?=\s|$)")
_ABBREVIATED = re.compile(r"(?:\b(?:No|p|pp|Fig|Vol|Ch)\.\s*\d|\b[A-Z]\.\s+(?:[A-Z]\.\s*)*[\w'-]+\.?\s*$)")
"""A point that ends no sentence: `No. 5`, `p. 12`, an initial and a name that end the text."""
MAX_LINE = 8_000
"""Characters of a line in which an answer is looked for."""
_EMPHASIS = "*_` \t"


@dataclass(frozen=True)
class AnswerForm:
    """One form."""

    answer: Callable[[str], Found]
    """The answer of a completion."""
    credit: Callable[[str], float]
    """1.0 for a completion that has the form, else 0.0."""
    expected: str
    """What a completion has to look like, for a person."""


def behind_reasoning(text: str) -> str:
    """What follows the last `</think>`; all of a text that has none, unless it is still reasoning."""
    if len(text) > MAX_TEXT_CHARS:
        return ""
    _, mark, after = text.rpartition(CLOSE)
    return without_calls(after) if mark or OPEN not in text else ""


def reasons_well(text: str) -> bool:
    """Whether the reasoning is marked once, at the start, or not at all."""
    text = text.strip()
    marks = text.count(OPEN), text.count(CLOSE)
    return marks == (0, 0) or (marks == (1, 1) and text.startswith(OPEN))


def _boxed(text: str) -> Found:
    return last_one(boxed_contents(behind_reasoning(text)))


def _boxed_credit(text: str) -> float:
    return float(reasons_well(text) and len(boxed_contents(behind_reasoning(text))) == 1)


def _marked(text: str) -> list[str]:
    """What follows each mark of the first kind that a text has: the rest of its line, up to the next mark."""
    pieces = (mark.split(text)[1:] for mark in _MARKS)
    return [piece.partition("\n")[0] for piece in next(filter(None, pieces), ())]


def first_sentence(answer: str) -> str:
    """What stands before the end of the first sentence: `12 apples` of `12 apples. Thanks.`"""
    answer = answer.strip(_EMPHASIS)
    return answer[: _sentence_end(answer)].strip(_EMPHASIS)


def _sentence_end(text: str) -> int | None:
    """Where the point of the first sentence stands; None if there is none in the part that is looked at."""
    for stop in islice(_STOP.finditer(text, 0, MAX_LINE), 20):
        word = max(text.rfind(" ", 0, stop.start()), text.rfind("\n", 0, stop.start())) + 1
        if _ABBREVIATED.match(text[word : stop.end() + 40]) is None:
            return stop.start()
    return None


def _trimmed(answer: str) -> Found:
    """The answer of a line, without emphasis, box, dollar signs and the end of its sentence; a hedge where
    its boxes differ."""
    inside = boxed_contents(answer)
    return last_one(inside) if inside else (unbox(first_sentence(answer[:MAX_LINE])), False)


def _final(text: str) -> Found:
    marked = list(dict.fromkeys(_marked(behind_reasoning(text))))
    answers = [_trimmed(line) for line in marked[-20:]]
    last, hedged = last_one(answer or "" for answer, _ in answers)
    return last, hedged or len(marked) > 20 or any(several for _, several in answers)


def _final_credit(text: str) -> float:
    rest = behind_reasoning(text).strip()
    last = rest.rpartition("\n")[2]
    return float(reasons_well(text) and len(_marked(rest)) == 1 and bool(_marked(last)))


def _whole(text: str) -> Found:
    rest = behind_reasoning(text).strip()
    answer, hedged = _trimmed(rest)
    return answer or None, hedged or not _one_sentence(rest)


def _one_sentence(text: str) -> bool:
    """Whether nothing follows a first line or sentence."""
    end = _sentence_end(text)
    return "\n" not in text and (end is None or not text[end + 1 :].strip(_EMPHASIS))


def _whole_credit(text: str) -> float:
    rest = behind_reasoning(text).strip()
    return float(reasons_well(text) and bool(rest) and _one_sentence(rest))


def _any_credit(text: str) -> float:
    return float(reasons_well(text) and bool(behind_reasoning(text).strip()))


def _any(text: str) -> Found:
    boxed, final = _boxed(text), _final(text)
    if boxed[0] is not None or final[0] is not None:
        return final if boxed[0] is None else boxed
    answer, hedged = _trimmed(behind_reasoning(text).strip().rpartition("\n")[2])
    return answer or None, hedged


FORMS = {
    "block": AnswerForm(final_answer, format_reward, "<think> ... </think><answer> $\\boxed{...}$ </answer>"),
    "boxed": AnswerForm(_boxed, _boxed_credit, "one \\boxed{...} behind the reasoning"),
    "final": AnswerForm(_final, _final_credit, '"#### ..." or "The answer is ..." at the end'),
    "whole": AnswerForm(_whole, _whole_credit, "the answer and nothing else, in one line"),
    "any": AnswerForm(_any, _any_credit, 'a box, or "The answer is ...", or the answer on the last line'),
}
"""By `rewards.answer`."""
