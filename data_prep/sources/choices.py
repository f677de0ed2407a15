"""Multiple choice: a record's choices, whether its question shows them, and the letter of the right one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from data_prep.sources.row_source import BadRecord, text_of
from trainer.rewards.grading.option_letters import listed, plain_words

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_OWN_LETTER = re.compile(r"\s*(?:\(([A-Za-z])\)|([A-Za-z])\s*[.):])\s*(?=\S)")


def texts_of(choices: Sequence[Any]) -> tuple[list[str], list[str]]:
    """(texts, letters) of choices: a list, a structure `{"A": ..., "B": ...}` or one of texts and labels.

    Letters that the texts carry themselves are taken off. Raises BadRecord.
    """
    labels: list[str] = []
    values = list(choices)
    if len(values) == 1 and isinstance(values[0], dict):
        labels, values = _structure(values[0])
    if any(isinstance(value, (dict, list)) for value in values):
        raise BadRecord("bad_choices", f"the choices are no texts: {str(choices)[:200]}")
    if len(values) > len(LETTERS):
        raise BadRecord("bad_choices", f"{len(values)} choices, and letters for {len(LETTERS)}")
    texts = [text_of(value).strip() for value in values]
    own = list(map(_OWN_LETTER.match, texts))
    letters = [(match[1] or match[2]).upper() for match in own if match]
    if letters == list(LETTERS[: len(texts)]):
        texts = [_OWN_LETTER.sub("", text, count=1) for text in texts]
    return texts, labels or list(LETTERS[: len(texts)])


def _structure(choices: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """(labels, texts) of choices that are a structure."""
    texts, labels = choices.get("text"), choices.get("label") or choices.get("labels")
    if isinstance(texts, list) and isinstance(labels, list) and len(texts) == len(labels):
        return list(map(text_of, labels)), texts
    named = {name: text for name, text in choices.items() if text is not None}
    by_letter = {name.strip("()._").rpartition("_")[2].upper(): text for name, text in named.items()}
    if sorted(by_letter) != list(LETTERS[: len(named)]) or len(named) < 2:
        raise BadRecord("bad_choices", f"a structure without letters: {', '.join(choices)}"[:200])
    return sorted(by_letter), [by_letter[letter] for letter in sorted(by_letter)]


def with_choices(question: str, choices: Sequence[Any], answer: Any, keep: bool) -> tuple[str, str]:
    """The question, with its choices if it does not show them with letters, and the letter of the right one.

    keep: an answer that is none of the choices stays as published. Raises BadRecord.
    """
    texts, labels = texts_of(choices)
    letter = _letter(texts, labels, answer)
    if not letter and not keep:
        raise BadRecord("bad_choices", f"answer {text_of(answer)!r} is not one of the choices {texts}")
    in_question = list(listed(question).values())
    in_column = list(map(plain_words, texts))
    if in_question != in_column and sorted(in_question) == sorted(in_column):
        raise BadRecord("bad_choices", f"the question lists its choices in another order than {texts}"[:200])
    if not shows(question, texts):
        lines = [f"{LETTERS[i]}. {text}" for i, text in enumerate(texts)]
        question = "\n".join([f"{question}\n", *lines])
    return question, letter or text_of(answer).strip()


def _letter(texts: list[str], labels: list[str], answer: Any) -> str:
    """The letter of the right choice; empty if the answer is none of them. Raises BadRecord for a number that
    is a choice's text and another one's position."""
    given = text_of(answer).strip()
    position = answer if isinstance(answer, int) and not isinstance(answer, bool) else -1
    by_text = texts.index(given) if texts.count(given) == 1 else -1
    if by_text >= 0 and 0 <= position < len(texts) and position != by_text:
        raise BadRecord(
            "bad_choices",
            f"answer {given} is the text of choice {LETTERS[by_text]} and the position of "
            f"{LETTERS[position]}: write the letter",
        )
    if by_text >= 0:
        return LETTERS[by_text]
    bare = given.strip("(). ")
    if bare.upper() in labels:
        return LETTERS[labels.index(bare.upper())]
    own = _OWN_LETTER.match(given)
    if own is not None and given[own.end() :].strip() in texts:
        return LETTERS[texts.index(given[own.end() :].strip())]
    return LETTERS[position] if 0 <= position < len(texts) else ""


def shows(question: str, texts: Sequence[str]) -> bool:
    """Whether a question lists the choices, each behind its letter."""
    start = 0
    for letter, text in zip(LETTERS, texts, strict=False):
        mark = re.compile(rf"(?<![A-Za-z])[(\[]?{letter}\s*[.):\]、．]\s*{re.escape(text)}", re.IGNORECASE)
        match = mark.search(question, start)
        if match is None:
            return False
        start = match.end()
    return True
