r"""How the authors of benchmarks score a completion, beside our own grader: by their scripts' rules.

    mathvista    the choice that is named or nearest in spelling, the integer part, the number rounded to the
                 row's `precision`; compared as text (evaluation/calculate_score.py of lupantech/MathVista)
    mathvision   the box or what follows "the answer is"; the letter or the choice's value, numbers to two
                 decimals (evaluation/evaluate.py of mathllm/MATH-V)
    mmmu-pro     the letter after the last "Answer:", else letters and choices in the text
                 (mmmu-pro/evaluate.py of MMMU-Benchmark/MMMU)

MathVista's answers are extracted by a judge model there and by our rules here. MathVerse has no rules: its
scorer is a judge model.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.rewards.grading.expression import read
from trainer.rewards.grading.notation import common_notation
from trainer.rewards.grading.stated_answers import FORMS
from trainer.rewards.grading.values import Point, Undefined, Unreadable, value

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_SCORED_CHARS = 100_000
"""A longer completion is wrong: no engine of ours writes it."""
MAX_CHOICE_CHARS = 1_000
"""What stands behind it is not compared with the choices' spelling."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE]-?\d+)?")
_SAID = ("the final answer is", "the answer is", "the correct answer is", "the answer should be")
_ENDS = (",", ".", "!", "?", ";", ":", "'")


def score(benchmark: str, text: str, reference: str, fields: Mapping[str, Any], form: str) -> float:
    """What the benchmark's own rules give a completion: 1, 0, or a guess's chance.

    Args:
        benchmark: a name of `SCORERS`.
        text: the whole completion.
        reference: the row's reference answer; of multiple choice the letter.
        fields: the row's own fields (`Row.extra`).
        form: where the answer stands (`rewards.answer`).
    """
    if len(text) > MAX_SCORED_CHARS:
        return 0.0
    return float(SCORERS[benchmark](text, reference, fields, form))


def choices_as_list(found: Any) -> list[str]:
    """Choices, which some sets keep as one text."""
    if isinstance(found, str):
        try:
            found = ast.literal_eval(found) if found.startswith("[") else json.loads(found)
        except (ValueError, SyntaxError):
            return []
    return list(map(str, found)) if isinstance(found, list) else []


# --- MathVista


def _mathvista(text: str, reference: str, fields: Mapping[str, Any], form: str) -> bool:
    choices = choices_as_list(fields.get("choices"))
    kind = fields.get("answer_type")
    found = _extracted(text, choices, form)
    if fields.get("question_type") == "multi_choice" and choices:
        return _choice(found, choices) == _gold(reference, choices)
    try:
        if kind == "integer":
            return str(int(float(_digits(found)))) == reference
        if kind == "float":
            return str(round(float(_digits(found)), int(float(fields["precision"])))) == reference
    except (ValueError, OverflowError, KeyError, TypeError):
        return False
    return found == reference


def _extracted(text: str, choices: Sequence[str], form: str) -> str:
    """The answer of a completion: the whole of it where that is a choice, what its form asks for, or the
    answer wherever it stands."""
    if text.strip() in choices:
        return text.strip()
    said = re.search(r'The answer is "(.*)"\.', text)
    if said is not None:
        return said[1].strip()
    in_form, _ = FORMS[form].answer(text)
    anywhere, _ = FORMS["any"].answer(text)
    return (in_form or anywhere or "").strip()


def _digits(found: str) -> str:
    """The number in an answer, if there is just one: a judge leaves units out."""
    numbers = _NUMBER.findall(found)
    return numbers[0].replace(",", "") if len(numbers) == 1 else found


def _gold(reference: str, choices: Sequence[str]) -> str:
    """The text of the right choice. A row whose answer is none of its choices was kept as published."""
    number = LETTERS.find(reference) if len(reference) == 1 else -1
    return choices[number] if 0 <= number < len(choices) else reference


def _choice(found: str, choices: Sequence[str]) -> str:
    """The choice that an answer names by its letter, else the one that is nearest in spelling."""
    bracketed = re.search(r"\(([a-zA-Z])\)", found)
    letter = bracketed[1].upper() if bracketed else found
    if len(letter) == 1 and letter in LETTERS[: len(choices)]:
        return choices[LETTERS.index(letter)]
    distances = [_edits(letter[:MAX_CHOICE_CHARS], choice) for choice in choices]
    return choices[distances.index(min(distances))]


def _edits(first: str, second: str) -> int:
    """Levenshtein's distance."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        above, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            cost = above if a == b else above + 1
            above, row[j] = row[j], min(cost, row[j] + 1, row[j - 1] + 1)
    return row[-1]


# --- MathVision


def _mathvision(text: str, reference: str, fields: Mapping[str, Any], form: str) -> bool:
    choices = choices_as_list(fields.get("options") or fields.get("choices"))
    found = _mathematical(_stated(text.strip()))
    for letter in "abcde":
        found = found.replace(f"({letter})", letter).replace(f"{{{letter}}}", letter)
    found = found.rstrip(".").lstrip(":").strip()
    worth = _gold(reference, choices) if choices else ""
    return _same_value(reference, found) or _same_value(worth, found)


def _stated(text: str) -> str:
    """The part of a completion that states the answer."""
    for letter in "ABCDE":
        ends = text.endswith((f" {letter}.", f" ({letter})."))
        if ends or text.startswith((f"{letter}\n", f"({letter})\n", f"({letter}) {letter}\n")):
            text = letter
    last = text.rpartition("is ")[2].rstrip(".")
    if _number(last) is not None:
        return last
    boxes = text.count("oxed{")
    if boxes:
        return "\\boxed{" + text.rpartition("oxed{")[2] if boxes > 1 else text
    for mark in _SAID:
        for said in (mark, mark.replace("the", "The")):
            _, found, rest = text.rpartition(said)
            if found:
                text = rest.strip().partition("\n")[0].partition(". ")[0]
    return text


_DROPPED = (" ", "\\,", "\n", "\\text", "\\mbox", "\\left", "\\right", "^{\\circ}", "^\\circ", "{m}^3", "m^3",
            "{units}", "units", "{km}", "km", "\\!", "\\$", "$", "\\%")  # fmt: skip


def _mathematical(text: str) -> str:
    """The answer in a stated part, in small letters, without what the script drops."""
    text = text.lower().replace("{}", "")
    start, end = text.find("oxed{"), text.rfind("}")
    if 0 <= start < end:
        text = text[start + len("oxed{") : end]
    close, opened = text.find("}"), text.find("{")
    if close >= 0 and (opened < 0 or close < opened):
        text = text[:close]
    text = text.rpartition("=")[2].rpartition("\\approx")[2]
    text = text.replace("∞", "\\infty").replace("+\\infty", "\\infty").replace("\\\\", "\\")
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("{.", "{0.")
    return f"0{text}" if text.startswith(".") else text


def _same_value(reference: str, found: str) -> bool:
    """Whether two answers are the same text, or the same number to two decimals."""
    reference, found = reference.lower().strip(), found.lower().strip()
    if not reference or not found:
        return False
    if reference == found:
        return True
    first = _parts(reference)
    second = _parts(found)
    return bool(first) and first == second


def _parts(text: str) -> tuple[Any, ...]:
    """A number rounded to two decimals, or those of a tuple or list with its brackets; () for anything
    else."""
    inside = text[1:-1].split(",")
    bracketed = len(inside) > 1 and text[0] + text[-1] in ("()", "[]")
    rounded = []
    for part in inside if bracketed else [text]:
        number = _number(part)
        if number is None:
            return ()
        rounded.append(round(number, 2))
    return (text[0] if bracketed else "", *rounded)


def _number(text: str) -> float | None:
    """The value of a number or an expression without symbols."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        expression = read(common_notation(text))
        if expression.symbols:
            return None
        found = value(expression.value, Point(0, "complex"))
        return float(found.real) if abs(found.imag) < 1e-9 else None
    except (Unreadable, Undefined, ArithmeticError, ValueError, RecursionError):
        return None


# --- MMMU-Pro


def _mmmu_pro(text: str, reference: str, fields: Mapping[str, Any], form: str) -> float:
    choices = choices_as_list(fields.get("options") or fields.get("choices"))
    letters = LETTERS[: len(choices)]
    _, marked, rest = text.rpartition("Answer:")
    named = [letter for letter in letters if letter in rest]
    if marked and len(named) == 1:
        return named[0] == reference
    for end in _ENDS:
        text = text.strip(end)
    text = f" {text} "
    places = _places(text, choices)
    if not places:  # the script draws one of the choices
        return 1 / len(choices) if reference in letters and choices else 0.0
    return max(places, key=places.__getitem__) == reference


def _places(text: str, choices: Sequence[str]) -> dict[str, int]:
    """Letters that the text names, by the first way of naming that occurs, and where each stands last; the
    first of those that share a place wins."""
    letters = LETTERS[: len(choices)]
    places = {}
    for named, sought in (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} ")):
        for letter in letters:
            if named.format(letter) in text:
                places[letter] = text.rfind(sought.format(letter))
        if places:
            return places

    if len(text.split()) <= 5:
        return {}
    small = text.lower()
    for letter, choice in zip(letters, choices, strict=True):
        if choice.lower() in small:
            places[letter] = small.rfind(choice.lower())
    return places


Scored = Callable[[str, str, Mapping[str, Any], str], float]
SCORERS: dict[str, Scored] = {
    "mathvista": _mathvista,
    "mathvision": _mathvision,
    "mmmu-pro": _mmmu_pro,
}
"""By benchmark: those whose authors score by rules of their own."""
