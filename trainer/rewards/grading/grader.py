r"""Decides whether an answer is the reference answer, by pure functions of strings.

The reference answer comes with the request; nothing is looked up by the text of a prompt. Which part of
a completion counts is said by its form (`forms.py`). Routes are tried in order, and each accepts one kind
exactly: letter, words, number, structure (`(1, 2)`, `3:4`, `12:05`), relation (`x > 3`), expression.
`decide_fast` takes the routes that need no evaluation. `decide` takes all of them. Its time is bounded
for all input that is known, but it belongs in a process that can be killed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from trainer.algorithm.traces import Verdict
from trainer.data.schema import AnswerType
from trainer.rewards.grading import choices, expression, naming, quantity, relations, structures
from trainer.rewards.grading.angles import in_radians
from trainer.rewards.grading.dates import date
from trainer.rewards.grading.expression import Rule, Undecided, Unreadable
from trainer.rewards.grading.extraction import MAX_BOX_CHARS, format_reward, unbox
from trainer.rewards.grading.forms import FORMS
from trainer.rewards.grading.notation import common_notation
from trainer.rewards.grading.units import split_unit

__all__ = [
    "BadReferenceError",
    "classify",
    "decide",
    "decide_fast",
    "format_reward",
    "grade",
    "judge",
    "judge_fast",
    "reference_error",
]


PLAIN = re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{1,15})?")
"""A number of sign, digits and point only, as most are."""


class BadReferenceError(ValueError):
    """The reference answer cannot be read: the row is wrong, not the completion."""


class _NeedsEvaluation(Exception):
    """Only the value of an expression decides, and the caller wants no evaluation."""


def grade(
    completion: str, reference: str, answer_type: AnswerType, question: str = "", form: str = "block"
) -> Verdict:
    """Grades one whole completion.

    Args:
        completion: the model's text, reasoning included.
        reference: the content of the reference answer's box, with or without `$…$` and `\\boxed{…}`.
        answer_type: the route (`classify(reference)`).
        question: its nouns may follow a number as units (`5 apples`).
        form: where the answer stands (`forms.FORMS`).

    Returns:
        "correct", "wrong", "no_answer" (none in that form), or "error" (the reference answer cannot be
        read).
    """
    content, hedged = FORMS[form].answer(completion)
    if content is None:
        return "no_answer"
    return decide("" if hedged else content, reference, answer_type, question)


def decide(content: str, reference: str, answer_type: AnswerType, question: str = "") -> Verdict:
    """Grades the content of a box.

    "error" if the reference answer cannot be read, or cannot be told from the answer (`Undecided`).
    """
    return judge(content, reference, answer_type, question)[0]


def judge(
    content: str, reference: str, answer_type: AnswerType, question: str = ""
) -> tuple[Verdict, Rule | None]:
    """`decide`, and the rule that decided; None for an error."""
    rules: set[Rule] = set()
    try:
        same = _equal(unbox(reference), unbox(content), answer_type, question, True, rules)
    except (BadReferenceError, Undecided):
        return "error", None
    return "correct" if same else "wrong", weakest(rules)


def judge_fast(
    content: str, reference: str, answer_type: AnswerType, question: str = ""
) -> tuple[Verdict | None, Rule | None]:
    """Like `judge`, by the form of the strings alone: microseconds.

    No verdict where something must be evaluated.
    """
    rules: set[Rule] = set()
    try:
        same = _equal(unbox(reference), unbox(content), answer_type, question, False, rules)
    except BadReferenceError:
        return "error", None
    except (_NeedsEvaluation, RecursionError):
        return None, None
    return "correct" if same else "wrong", weakest(rules)


def decide_fast(content: str, reference: str, answer_type: AnswerType, question: str = "") -> Verdict | None:
    """The verdict of `judge_fast`."""
    return judge_fast(content, reference, answer_type, question)[0]


def weakest(rules: set[Rule]) -> Rule:
    """The rule that an answer of several parts rests on: points, then exact values, then texts."""
    if "points" in rules:
        return "points"
    return "exact" if "exact" in rules else "text"


def classify(reference: str) -> AnswerType:
    """The route that fits a reference answer."""
    reference = unbox(reference)
    if PLAIN.fullmatch(reference):
        return "number"
    if choices.option_letter(reference) and not reference.strip().islower():
        return "letter"
    if date(reference) is not None:
        return "text"
    if quantity.parse(reference, reference) is not None:
        return "number"
    return "text" if choices.is_text(reference) else "math"


def reference_error(reference: str, answer_type: AnswerType, question: str = "") -> str | None:
    """Why nothing can be graded against a reference answer, or None. Evaluates it, like `decide`.

    Besides being readable it must equal itself: what nothing can match is a data error too.
    """
    content = unbox(reference)
    if not content or not common_notation(content):
        return "empty reference answer"
    if len(content) > MAX_BOX_CHARS:
        return f"reference answer longer than {MAX_BOX_CHARS} characters"
    try:
        if not _equal(content, content, answer_type, question, True, set(), by_spelling=False):
            return f"reference answer {content[:80]!r} does not equal itself as {answer_type}"
    except Undecided:
        return f"reference answer {content[:80]!r} is too large to be told from its neighbors"
    except BadReferenceError:
        return f"unreadable reference answer {content[:80]!r} ({answer_type})"
    except RecursionError:
        return f"reference answer {content[:80]!r} is nested too deeply"
    return None


def _equal(
    reference: str,
    answer: str,
    answer_type: AnswerType,
    question: str,
    evaluate: bool,
    rules: set[Rule],
    by_spelling: bool = True,
) -> bool:
    """Whether two contents are one answer. Adds what decided to `rules`."""
    if not reference:
        raise BadReferenceError("empty reference answer")
    if not answer or len(answer) > MAX_BOX_CHARS:
        return False
    if answer_type == "letter":
        wanted = choices.option_letter(reference)
        if wanted is None:
            raise BadReferenceError(f"the reference answer {reference[:80]!r} is no option letter")
        return choices.option_letter(answer) == wanted
    if answer_type == "number" and PLAIN.fullmatch(reference) and PLAIN.fullmatch(answer):
        rules.add("exact")
        return Decimal(reference) == Decimal(answer)
    day = date(reference)
    if day is not None and date(answer) is not None:
        return date(answer) == day
    parts = structures.lettered_parts(reference) if answer_type != "number" else None
    if parts is not None:
        given = structures.lettered_parts(answer) or _bare_list(answer)
        if len(parts) != len(given):
            return False
        pairs = list(zip(parts, given, strict=True))
        return all(_equal(r, a, classify(r), question, evaluate, rules, by_spelling) for r, a in pairs)

    if answer_type == "text":
        if not choices.plain_words(reference):
            raise BadReferenceError(f"the reference answer {reference[:80]!r} has no words")
        if choices.same_words(reference, answer, question):
            return True
        reference = choices.in_symbols(reference)
        if reference not in choices.IN_WORDS and quantity.parse(reference) is None:
            return False
    comparison = _Comparison(f"{question} {reference}", evaluate, by_spelling, rules)
    answer = choices.in_symbols(answer)
    if quantity.parse(reference, reference) is None:
        if answer_type == "number":
            raise BadReferenceError(f"the reference answer {reference[:80]!r} is no number")
        if choices.is_text(reference):
            return choices.same_words(reference, answer, question)
    return comparison.values(reference, answer)


def _bare_list(answer: str) -> tuple[str, ...]:
    """The parts of a list or tuple; none for anything else."""
    structure = structures.parse(answer)
    return structure.parts if structure is not None and structure.kind in ("list", "()") else ()


_APPROXIMATELY = re.compile(r"\s*\\approx(?![a-zA-Z])\s*")
_EMPTY_SET = re.compile(r"\\\{\s*\\\}|\\emptyset(?![a-zA-Z])")


def _is_one(structure: structures.Structure) -> bool:
    return structure.kind == "set" and len(structure.parts) == 1


@dataclass(frozen=True)
class _Comparison:
    """One reference answer against one box."""

    context: str
    """Question and reference answer, from which nouns and names come."""
    evaluate: bool
    by_spelling: bool
    """Whether equal texts count as equal values without evaluation."""
    rules: set[Rule]
    """What decided so far."""

    def values(self, reference: str, answer: str, inner: bool = False, step: bool = False) -> bool:
        """Compares numbers, then structures and relations, then expressions.

        Parts of structures are compared by it, too (`inner`), and what a result follows (`step`), in which
        sums may be left.
        """
        raw = reference, answer
        reference, answer = common_notation(reference), common_notation(answer)
        if not reference:
            raise BadReferenceError("empty reference answer")
        reference, answer = self.unnamed(reference, answer), self.unnamed(answer, reference)
        reference, answer = naming.function_bodies(reference, answer)

        number = quantity.parse(reference, self.context)
        answered_number = quantity.parse(answer, self.context)
        if number is not None and answered_number is not None:
            self.rules.add("exact")
            if answered_number.divides and not (step or number.divides):
                return False
            return quantity.equal(number, answered_number)
        angles = in_radians(reference, answer)
        if angles is not None:
            return self.expressions(*angles)
        same_form = self.by_form(reference, answer)
        if same_form is not None:
            return same_form

        wanted = structures.parse(reference)
        given = structures.parse(answer)
        if wanted is not None and given is not None and _is_one(wanted) == _is_one(given):
            return self.parts(wanted, given, inner)
        about = relations.is_relation(reference)
        if given is None and "=" not in reference and not about:
            if "=" in answer:
                return not inner and self.chain(reference, answer)
            if _APPROXIMATELY.search(answer):
                return not inner and self.approximation(reference, answer)
        if about or relations.is_relation(answer):
            interval = wanted is not None and wanted.kind in structures.INTERVALS and len(wanted.parts) == 2
            comparable = relations.is_relation(answer) or given is not None
            return (about or interval) and self.relations(reference, answer, comparable)

        # A value equals a set of that value, and no other structure.
        if wanted is not None and _is_one(wanted):
            return self.values(wanted.parts[0], answer, True)
        if given is not None and _is_one(given):
            return self.values(reference, given.parts[0], True)
        if wanted is not None or given is not None:
            return False
        if number is not None:
            return self.expression_of_number(number, reference, answer, raw[1], step)
        return self.expressions(*self.without_units(raw, (reference, answer)))

    def unnamed(self, s: str, other: str) -> str:
        return naming.strip_name(s, other, self.context)

    def by_form(self, reference: str, answer: str) -> bool | None:
        """Compares times of day, ratios, numbers of other bases, and the empty set.

        None if the reference is none of these.
        """
        time = structures.clock_time(reference)
        if time is not None:
            answered = structures.clock_time(answer)
            return answered is not None and structures.same_time(time, answered)
        ratio = structures.ratio(reference)
        if ratio is not None:
            return _ratio_equal(ratio, answer)
        based = structures.digits_and_base(reference)
        if based is not None:
            return structures.digits_and_base(answer) == based
        proportion = structures.proportion(reference)
        if proportion is not None:
            return self.proportions(proportion, structures.proportion(answer) or ("",))
        if _EMPTY_SET.fullmatch(reference):
            return _EMPTY_SET.fullmatch(answer) is not None
        return None

    def proportions(self, reference: Sequence[str], answer: Sequence[str]) -> bool:
        """Whether all terms have the same quotient by the first one: `a:b` and `2a:2b`."""
        if len(reference) != len(answer):
            return False
        for r, a in zip(reference[1:], answer[1:], strict=True):
            if not self.expressions(f"({r})/({reference[0]})", f"({a})/({answer[0]})"):
                return False
        return True

    def chain(self, reference: str, answer: str) -> bool:
        """Whether all sides of a chain are the reference: `x = \\frac12 = 0.5`, but not `61 = 60` or `A
        = B`."""
        sides = re.split(r"\s*=\s*", answer)
        if naming.is_name(sides[0], self.context):
            sides = sides[1:]
        if not all(sides) or len(sides) > 4:
            return False
        *exact, last = sides
        if not all(self.values(reference, side, inner=True, step=True) for side in exact):
            return False
        if "\\approx" in last:
            return self.approximation(reference, last)
        return self.values(reference, last, inner=True)

    def approximation(self, reference: str, answer: str) -> bool:
        r"""Whether an approximation states the reference: `\frac{1}{6} \approx 0.167`.

        The decimal must be the correct rounding of the other side.
        """
        sides = _APPROXIMATELY.split(answer)
        decimal = quantity.parse(sides[1], self.context) if len(sides) == 2 else None
        if decimal is None or abs(decimal.value) * 10**decimal.decimals < 10 or decimal.decimals < 1:
            return False
        value, unit = split_unit(sides[0], self.context)
        number = quantity.parse(sides[0], self.context)
        if unit and decimal.unit and unit != decimal.unit:
            return False
        stated = sides[:1] if number and number.decimals >= 0 else sides
        if not any(self.values(reference, side, inner=True, step=True) for side in stated):
            return False
        exact = f"{number.value.numerator}/{number.value.denominator}" if number else value

        def rounded() -> bool:
            self.rules.add("points")
            return expression.rounds_to(expression.read(exact), decimal.value, decimal.decimals)

        return self.evaluated(rounded)

    def parts(self, reference: structures.Structure, answer: structures.Structure, inner: bool) -> bool:
        """Compares two structures part by part.

        Sets within sets are compared by spelling only: to try all pairs at every level takes
        exponential time.
        """
        if not any("=" in part for part in answer.parts):
            reference = structures.values(reference)
        elif not any("=" in part for part in reference.parts):
            answer = structures.values(answer, by_name=True)
        match structures.compatible(reference, answer, self.context):
            case "ordered":
                parts = zip(reference.parts, answer.parts, strict=True)
                return all(self.values(r, a, inner=True) for r, a in parts)
            case "unordered" if inner:
                return set(reference.parts) == set(answer.parts)
            case "unordered":
                return self.cover(reference.parts, answer.parts)
        return False

    def cover(self, reference: tuple[str, ...], answer: tuple[str, ...]) -> bool:
        """Whether every part of either side equals a part of the other side."""
        if len(reference) > 20 or len(answer) > 20:
            return reference == answer
        pairs = []
        for r in reference:
            pairs.append([self.values(r, a, inner=True) for a in answer])

        return all(map(any, pairs)) and all(map(any, zip(*pairs, strict=True)))

    def relations(self, reference: str, answer: str, comparable: bool) -> bool:
        """Whether two relations or sets say the same."""

        def same() -> bool:
            try:
                relations.check(reference)
            except Unreadable:
                raise BadReferenceError(reference) from None
            if not comparable or relations.work_left(answer) > relations.work_left(reference):
                return False
            self.rules.add(relations.rule(reference, answer))
            return relations.equal(reference, answer)

        return self.spelled_alike(reference, answer) or self.evaluated(same)

    def expression_of_number(
        self, r: quantity.Quantity, reference: str, answer: str, raw: str, step: bool
    ) -> bool:
        """Whether an answer that is not simplified equals a number: `\\sqrt{16}`, `2^3`; 3:4 for 3/4.

        Sums and products are work that is left undone: a policy that need not do it learns not to.
        """
        ratio = structures.ratio(answer)
        if ratio is not None:
            of_two = structures.clock_time(answer) is None and len(ratio) == 2 and ratio[1] != 0
            return of_two and r.decimals < 0 and r.value == ratio[0] / ratio[1]
        answer, unit = split_unit(raw, self.context)
        answer = self.unnamed(answer, reference)
        if "," in answer or ":" in answer or (unit and r.unit and unit != r.unit):
            return False
        value = r.value / 100 if r.percent else r.value
        return self.expressions(f"{value.numerator}/{value.denominator}", answer, done=not step)

    def without_units(self, raw: tuple[str, str], cleaned: tuple[str, str]) -> tuple[str, str]:
        """Both expressions without units, the answer scaled to the unit of the reference.

        The answer is empty if the units do not fit.
        """
        reference, answer = cleaned
        bare_reference, wanted = split_unit(raw[0], self.context)
        bare_answer, unit = split_unit(raw[1], self.context)
        if wanted:
            reference = self.unnamed(bare_reference, cleaned[1])
        if unit:
            answer = self.unnamed(bare_answer, cleaned[0])
        if not wanted or not unit or not wanted.dimensions or not unit.dimensions:
            return reference, answer
        if wanted.dimensions != unit.dimensions:
            return reference, ""
        scale = unit.size / wanted.size
        if scale != 1:
            answer = f"({scale.numerator}/{scale.denominator})({answer})"
        return reference, answer

    def expressions(self, reference: str, answer: str, done: bool = False) -> bool:
        """Whether two expressions have the same value, the answer without sums and products if `done`."""
        wanted = _read(reference)
        if self.spelled_alike(reference, answer):
            return True
        try:
            given = expression.read(answer)
        except Unreadable:
            return False
        if not given.symbols <= wanted.symbols or (done and given.arithmetic):
            return False

        def same() -> bool:
            try:
                self.rules.add(expression.rule(wanted, given))
                return expression.equal(wanted, given)
            except Unreadable:
                # If the reference does not even equal itself, the row is wrong.
                try:
                    expression.equal(wanted, wanted)
                except Unreadable:
                    raise BadReferenceError(reference) from None
                return False

        return self.evaluated(same)

    def spelled_alike(self, reference: str, answer: str) -> bool:
        return self.by_spelling and reference.replace(" ", "") == answer.replace(" ", "")

    def evaluated(self, compare) -> bool:
        if not self.evaluate:
            raise _NeedsEvaluation
        try:
            return compare()
        except Unreadable:
            return False


def _read(reference: str) -> expression.Expression:
    try:
        return expression.read(reference)
    except Unreadable as error:
        raise BadReferenceError(f"{reference[:80]!r}: {error}") from None


def _ratio_equal(reference: tuple[quantity.Fraction, ...], answer: str) -> bool:
    ratio = structures.ratio(answer)
    if ratio is not None:
        return ratio == reference
    number = quantity.parse(answer)
    if number is None or number.percent or number.unit or len(reference) != 2 or not reference[1]:
        return False
    return number.decimals < 0 and number.value == reference[0] / reference[1]
