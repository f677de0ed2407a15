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
from trainer.rewards.grading import choices, expression, quantity, relations, structures
from trainer.rewards.grading.expression import Unreadable
from trainer.rewards.grading.extraction import MAX_BOX_CHARS, format_reward, unbox
from trainer.rewards.grading.forms import FORMS
from trainer.rewards.grading.notation import clean, split_top
from trainer.rewards.grading.units import nouns, split_unit

__all__ = [
    "BadReferenceError",
    "classify",
    "decide",
    "decide_fast",
    "format_reward",
    "grade",
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
    """Grades the content of a box. "error" if the reference answer cannot be read."""
    try:
        same = _equal(unbox(reference), unbox(content), answer_type, question, evaluate=True)
    except BadReferenceError:
        return "error"
    return "correct" if same else "wrong"


def decide_fast(content: str, reference: str, answer_type: AnswerType, question: str = "") -> Verdict | None:
    """Like `decide`, by the form of the strings alone: microseconds.

    None where something must be evaluated.
    """
    try:
        same = _equal(unbox(reference), unbox(content), answer_type, question, evaluate=False)
    except BadReferenceError:
        return "error"
    except (_NeedsEvaluation, RecursionError):
        return None
    return "correct" if same else "wrong"


def classify(reference: str) -> AnswerType:
    """The route that fits a reference answer."""
    reference = unbox(reference)
    if PLAIN.fullmatch(reference):
        return "number"
    if choices.letter(reference) and not reference.strip().islower():
        return "letter"
    if quantity.parse(reference, reference) is not None:
        return "number"
    return "text" if choices.is_text(reference) else "math"


def reference_error(reference: str, answer_type: AnswerType, question: str = "") -> str | None:
    """Why nothing can be graded against a reference answer, or None. Evaluates it, like `decide`.

    Besides being readable it must equal itself: what nothing can match is a data error too.
    """
    content = unbox(reference)
    if not content or not clean(content):
        return "empty reference answer"
    if len(content) > MAX_BOX_CHARS:
        return f"reference answer longer than {MAX_BOX_CHARS} characters"
    try:
        if not _equal(content, content, answer_type, question, evaluate=True, by_spelling=False):
            return f"reference answer {content[:80]!r} does not equal itself as {answer_type}"
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
    by_spelling: bool = True,
) -> bool:
    if not reference:
        raise BadReferenceError("empty reference answer")
    if not answer or len(answer) > MAX_BOX_CHARS:
        return False
    match answer_type:
        case "letter":
            wanted = choices.letter(reference)
            if wanted is None:
                raise BadReferenceError(f"the reference answer {reference[:80]!r} is no option letter")
            return choices.letter(answer) == wanted
        case "text":
            if not choices.words(reference):
                raise BadReferenceError(f"the reference answer {reference[:80]!r} has no words")
            if choices.same_words(reference, answer):
                return True
            reference = choices.in_symbols(reference)
            if reference not in choices.IN_WORDS:
                return False
    if answer_type == "number" and PLAIN.fullmatch(reference) and PLAIN.fullmatch(answer):
        return Decimal(reference) == Decimal(answer)
    comparison = _Comparison(f"{question} {reference}", evaluate, by_spelling)
    answer = choices.in_symbols(answer)
    if quantity.parse(reference, reference) is None:
        if answer_type == "number":
            raise BadReferenceError(f"the reference answer {reference[:80]!r} is no number")
        if choices.is_text(reference):
            return choices.same_words(reference, answer)
    return comparison.values(reference, answer)


_SYMBOL = r"(?:\\?[a-zA-Z]+|\\(?:vec|bar|hat|overline)\s*\{[a-zA-Z]{1,3}\})(?:_(?:\w|\{\w{1,6}\}))?'*"
_NAME = re.compile(
    rf"(?:m\s*)?\(?\\(?:angle|triangle)\s*[A-Za-z0-9]{{1,4}}\)?|[A-Z]{{1,4}}|\|[A-Za-z]{{1,2}}\||{_SYMBOL}"
    rf"|{_SYMBOL}\s*\([^()=]{{1,24}}\)|\\(?:sin|cos|tan)\s*\(?(?:\\angle\s*)?(?:[A-Za-z]|\\[a-z]+)\)?"
    rf"|\\frac\s*\{{\s*d\s*[a-z]\s*\}}\s*\{{\s*d\s*[a-z]\s*\}}|\\frac\s*\{{[A-Z]{{1,3}}\}}\s*\{{[A-Z]{{1,3}}\}}"
    rf"|{_SYMBOL}\s*:\s*{_SYMBOL}",
    re.ASCII,
)
r"""A name of a value, left of an equals sign: `x_1`, `f(2)`, `m\angle ABC`, `AB`, `\sin A`."""
_TUPLE_OF_NAMES = re.compile(rf"\(\s*{_SYMBOL}(?:\s*,\s*{_SYMBOL}){{1,3}}\s*\)", re.ASCII)
_TUPLES = re.compile(r"\(([^()=]*,[^()=]*)\)\s*=\s*\((.*,.*)\)")
_WORDS = re.compile(r"[A-Za-z]{2,20}(?:\s+[A-Za-z]{2,20}){0,5}", re.ASCII)
_QUANTITIES_TEXT = (
    "area perimeter volume length width height radius diameter circumference probability answer result "
    "total value distance speed velocity time cost price number mean median mode average range slope ratio "
    "ans the of "
)
_QUANTITIES = frozenset(_QUANTITIES_TEXT.split())
_LEAD = re.compile(
    r"\A(?:(?:so|thus|hence|therefore),? )?(?:the )?(?:final |correct )?(?:answer|result|value) "
    r"(?:is|equals)(?: equal to)?:? ",
    re.ASCII | re.IGNORECASE,
)
_POINT = re.compile(r"[A-Z]\s*(\([^()]*,.*\))", re.ASCII)
_FUNCTION = re.compile(r"(y|[a-zA-Z]\s*\(\s*[a-xz]\s*\))\s*=\s*([^=]+)", re.ASCII)
_EQUALS = re.compile(r"\s*(?:=|\\approx(?![a-zA-Z]))\s*")
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

    def values(self, reference: str, answer: str, inner: bool = False) -> bool:
        """Compares numbers, then structures and relations, then expressions.

        Parts of structures are compared by it, too (`inner`).
        """
        raw = reference, answer
        reference, answer = clean(reference), clean(answer)
        if not reference:
            raise BadReferenceError("empty reference answer")
        reference, answer = self.unnamed(reference, answer), self.unnamed(answer, reference)
        reference, answer = _function_bodies(reference, answer)

        number = quantity.parse(reference, self.context)
        answered_number = quantity.parse(answer, self.context)
        if number is not None and answered_number is not None:
            return quantity.equal(number, answered_number)
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
            return self.expression_of_number(number, reference, answer, raw[1])
        return self.expressions(*self.without_units(raw, (reference, answer)))

    def unnamed(self, s: str, other: str) -> str:
        """`s` without a name in front (`x =`), if `other` has no equals sign.

        If it has one, `(x, y) = (1, 2)` becomes `x = 1, y = 2`.
        """
        pair = _TUPLES.fullmatch(s) if "=" in other else None
        if pair is not None:
            names = split_top(pair[1])
            values = split_top(pair[2])
            if len(names) != len(values):
                return s
            return ", ".join(f"{n} = {v}" for n, v in zip(names, values, strict=True))

        s = _LEAD.sub("", s)
        point = _POINT.fullmatch(s) if other.startswith("(") else None
        if point is not None:
            return point[1]
        sides = _EQUALS.split(s)
        if len(sides) != 2 or not sides[1] or "=" in other or "\\approx" in other:
            return s
        return sides[1] if self.names(sides[0]) else s

    def names(self, s: str) -> bool:
        """Whether this is a name of a value: never a denial, and a tuple only in the order of the
        alphabet."""
        if _TUPLE_OF_NAMES.fullmatch(s):
            parts = list(map(str.strip, s[1:-1].split(",")))
            asked_so = s.replace(" ", "") in self.context.replace(" ", "")
            return asked_so or parts == sorted(parts)
        if _WORDS.fullmatch(s) and not _NAME.fullmatch(s):
            asked = nouns(self.context) | _QUANTITIES
            return asked.issuperset(s.lower().split())
        match = _NAME.fullmatch(s)
        if match is None or not re.fullmatch(r"[A-Za-z]{2,}", s):
            return match is not None
        return (s.isupper() and len(s) <= 4) or s.lower() in nouns(self.context) | _QUANTITIES

    def by_form(self, reference: str, answer: str) -> bool | None:
        """Compares times of day, ratios, numbers of other bases, and the empty set.

        None if the reference is none of these.
        """
        time = structures.clock(reference)
        if time is not None:
            answered = structures.clock(answer)
            return answered is not None and structures.same_time(time, answered)
        ratio = structures.ratio(reference)
        if ratio is not None:
            return _ratio_equal(ratio, answer)
        based = structures.based(reference)
        if based is not None:
            return structures.based(answer) == based
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
        if self.names(sides[0]):
            sides = sides[1:]
        if not all(sides) or len(sides) > 4:
            return False
        *exact, last = sides
        if not all(self.values(reference, side, inner=True) for side in exact):
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
        if not any(self.values(reference, side, inner=True) for side in stated):
            return False
        exact = f"{number.value.numerator}/{number.value.denominator}" if number else value

        def rounded() -> bool:
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
        match structures.compatible(reference, answer):
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
            return comparable and relations.equal(reference, answer)

        return self.spelled_alike(reference, answer) or self.evaluated(same)

    def expression_of_number(self, r: quantity.Quantity, reference: str, answer: str, raw: str) -> bool:
        """Whether an answer that is not simplified equals a number: `\\sqrt{16}`, `2^3`; 3:4 for 3/4."""
        ratio = structures.ratio(answer)
        if ratio is not None:
            of_two = structures.clock(answer) is None and len(ratio) == 2 and ratio[1] != 0
            return of_two and r.decimals < 0 and r.value == ratio[0] / ratio[1]
        answer, unit = split_unit(raw, self.context)
        answer = self.unnamed(answer, reference)
        if "," in answer or ":" in answer or (unit and r.unit and unit != r.unit):
            return False
        value = r.value / 100 if r.percent else r.value
        return self.expressions(f"{value.numerator}/{value.denominator}", answer)

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

    def expressions(self, reference: str, answer: str) -> bool:
        """Whether two expressions have the same value."""
        wanted = _read(reference)
        if self.spelled_alike(reference, answer):
            return True
        try:
            given = expression.read(answer)
        except Unreadable:
            return False
        if not given.symbols <= wanted.symbols:
            return False

        def same() -> bool:
            try:
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


def _function_bodies(reference: str, answer: str) -> tuple[str, str]:
    """The right sides of `y = …` and `f(x) = …`, if one side has each form; else both as they are."""
    left = _FUNCTION.fullmatch(reference)
    right = _FUNCTION.fullmatch(answer)
    if left is None or right is None:
        return reference, answer
    if (left[1] == "y") == (right[1] == "y") or "y" in left[2]:
        return reference, answer
    return left[2], right[2]


def _ratio_equal(reference: tuple[quantity.Fraction, ...], answer: str) -> bool:
    ratio = structures.ratio(answer)
    if ratio is not None:
        return ratio == reference
    number = quantity.parse(answer)
    if number is None or number.percent or number.unit or len(reference) != 2 or not reference[1]:
        return False
    return number.decimals < 0 and number.value == reference[0] / reference[1]
