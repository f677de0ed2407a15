r"""The grader: is this the reference answer? Pure functions of strings.

The reference answer comes with the request; nothing is looked up by the text of a prompt. Only the last
box in the `<answer>` block counts. Routes are tried in order, each exact about what it accepts: letter,
words, number, structure (`(1, 2)`, `3:4`, `12:05`), relation (`x > 3`), expression. `decide_fast` takes
those that need no evaluation; `decide` takes all, in bounded time for all that is known, and belongs
into a worker process that can be killed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from trainer.algorithm.traces import Verdict
from trainer.data.schema import AnswerType
from trainer.rewards.grading import choices, expression, quantity, relations, structures
from trainer.rewards.grading.expression import Unreadable
from trainer.rewards.grading.extraction import MAX_BOX_CHARS, final_answer, format_reward, unbox
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
"""Most numbers: nothing but sign, digits and point."""


class BadReferenceError(ValueError):
    """The reference answer cannot be read: the row is wrong, not the completion."""


class _NeedsEvaluation(Exception):
    """Raised on the fast path where only the value of an expression can tell."""


def grade(completion: str, reference: str, answer_type: AnswerType, question: str = "") -> Verdict:
    """Grades one whole completion.

    Args:
        completion: the model's text with its think and answer blocks.
        reference: the content of the reference answer's box; `$…$` and `\\boxed{…}` around it are taken off.
        answer_type: the route (`classify(reference)`).
        question: its nouns may follow a number as units (`5 apples`).

    Returns:
        "correct", "wrong", "no_answer" (no complete box in an answer block), or "error" (unreadable reference answer).
    """
    content, hedged = final_answer(completion)
    if content is None:
        return "no_answer"
    return decide("" if hedged else content, reference, answer_type, question)


def decide(content: str, reference: str, answer_type: AnswerType, question: str = "") -> Verdict:
    """Grades the content of a box. "error" if the reference answer cannot be read."""
    try:
        return (
            "correct"
            if _equal(unbox(reference), unbox(content), answer_type, question, evaluate=True)
            else "wrong"
        )
    except BadReferenceError:
        return "error"


def decide_fast(content: str, reference: str, answer_type: AnswerType, question: str = "") -> Verdict | None:
    """Like `decide`, by the form of the strings alone: microseconds. None where something must be
    evaluated."""
    try:
        return (
            "correct"
            if _equal(unbox(reference), unbox(content), answer_type, question, evaluate=False)
            else "wrong"
        )
    except BadReferenceError:
        return "error"
    except (_NeedsEvaluation, RecursionError):
        return None


def classify(reference: str) -> AnswerType:
    """The route for a reference answer."""
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
            if (reference := choices.in_symbols(reference)) not in choices.IN_WORDS:
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
r"""What may stand before an equals sign and names a value: `x_1`, `f(2)`, `m\angle ABC`, `AB`, `\sin A`."""
_TUPLE_OF_NAMES = re.compile(rf"\(\s*{_SYMBOL}(?:\s*,\s*{_SYMBOL}){{1,3}}\s*\)", re.ASCII)
_TUPLES = re.compile(r"\(([^()=]*,[^()=]*)\)\s*=\s*\((.*,.*)\)")
_WORDS = re.compile(r"[A-Za-z]{2,20}(?:\s+[A-Za-z]{2,20}){0,5}", re.ASCII)
_QUANTITIES_TEXT = (
    "area perimeter volume length width height radius diameter circumference probability answer result total value "
    "distance speed velocity time cost price number mean median mode average range slope ratio ans the of "
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
_INTERVALS = frozenset(("()", "[]", "(]", "[)"))


def _is_one(structure: structures.Structure) -> bool:
    return structure.kind == "set" and len(structure.parts) == 1


@dataclass(frozen=True)
class _Comparison:
    """One reference answer against one box."""

    context: str
    """Question and reference answer: where nouns and names may come from."""
    evaluate: bool
    by_spelling: bool
    """The same text is the same value."""

    def values(self, reference: str, answer: str, inner: bool = False) -> bool:
        """Numbers, then structures and relations, then expressions; parts of structures come back here
        (`inner`)."""
        raw = reference, answer
        reference, answer = clean(reference), clean(answer)
        if not reference:
            raise BadReferenceError("empty reference answer")
        reference, answer = self.unnamed(reference, answer), self.unnamed(answer, reference)
        sides = _FUNCTION.fullmatch(reference), _FUNCTION.fullmatch(answer)
        if sides[0] and sides[1] and (sides[0][1] == "y") != (sides[1][1] == "y") and "y" not in sides[0][2]:
            reference, answer = sides[0][2], sides[1][2]
        r, a = quantity.parse(reference, self.context), quantity.parse(answer, self.context)
        if r is not None and a is not None:
            return quantity.equal(r, a)
        if (special := self.by_form(reference, answer)) is not None:
            return special
        wanted, said = structures.parse(reference), structures.parse(answer)
        if wanted is not None and said is not None and _is_one(wanted) == _is_one(said):
            return self.parts(wanted, said, inner)
        if said is None and "=" not in reference and not relations.is_relation(reference):
            if "=" in answer:
                return not inner and self.chain(reference, answer)
            if _APPROXIMATELY.search(answer):
                return not inner and self.approximation(reference, answer)
        if relations.is_relation(reference) or relations.is_relation(answer):
            about = relations.is_relation(reference) or (
                wanted is not None and wanted.kind in _INTERVALS and len(wanted.parts) == 2
            )
            return about and self.relations(
                reference, answer, relations.is_relation(answer) or said is not None
            )
        if wanted is not None or said is not None:  # one value is a set of one, and no other structure
            if wanted is not None and _is_one(wanted):
                return self.values(wanted.parts[0], answer, True)
            return said is not None and _is_one(said) and self.values(reference, said.parts[0], True)
        if r is not None:
            return self.expression_of_number(r, reference, answer, raw[1])
        return self.expressions(*self.without_units(raw, (reference, answer)))

    def unnamed(self, s: str, other: str) -> str:
        """Takes `x =` off where the other side has no equals sign; `(x, y) = (1, 2)` is `x = 1, y = 2`
        where it has."""
        if "=" in other and (pair := _TUPLES.fullmatch(s)) is not None:
            names, values = split_top(pair[1]), split_top(pair[2])
            return (
                ", ".join(f"{n} = {v}" for n, v in zip(names, values, strict=True))
                if len(names) == len(values)
                else s
            )
        s = _LEAD.sub("", s)
        if other.startswith("(") and (point := _POINT.fullmatch(s)) is not None:
            return point[1]
        sides = _EQUALS.split(s)
        if len(sides) != 2 or not sides[1] or "=" in other or "\\approx" in other:
            return s
        return sides[1] if self.names(sides[0]) else s

    def names(self, s: str) -> bool:
        """Whether this is a name of a value: never a denial, and a tuple only in the order of the
        alphabet."""
        if _TUPLE_OF_NAMES.fullmatch(s):
            parts = [p.strip() for p in s[1:-1].split(",")]
            return parts == sorted(parts) or s.replace(" ", "") in self.context.replace(" ", "")
        if _WORDS.fullmatch(s) and not _NAME.fullmatch(s):
            asked = nouns(self.context) | _QUANTITIES
            return asked.issuperset(s.lower().split())
        match = _NAME.fullmatch(s)
        if match is None or not re.fullmatch(r"[A-Za-z]{2,}", s):
            return match is not None
        return (s.isupper() and len(s) <= 4) or s.lower() in nouns(self.context) | _QUANTITIES

    def by_form(self, reference: str, answer: str) -> bool | None:
        """Times of day, ratios, numbers of other bases, the empty set; None where the reference is none
        of these."""
        if (time := structures.clock(reference)) is not None:
            said = structures.clock(answer)
            return said is not None and structures.same_time(time, said)
        if (ratio := structures.ratio(reference)) is not None:
            return _ratio_equal(ratio, answer)
        if (based := structures.based(reference)) is not None:
            return structures.based(answer) == based
        if (wanted := structures.proportion(reference)) is not None:
            (first, *rest), (head, *tail) = wanted, structures.proportion(answer) or ("",)
            return len(rest) == len(tail) and all(
                self.expressions(f"({w})/({first})", f"({s})/({head})")
                for w, s in zip(rest, tail, strict=True)
            )
        if _EMPTY_SET.fullmatch(reference):
            return _EMPTY_SET.fullmatch(answer) is not None
        return None

    def chain(self, reference: str, answer: str) -> bool:
        """`x = \\frac12 = 0.5` states one number; `61 = 60` and `A = B` state none."""
        sides = re.split(r"\s*=\s*", answer)
        sides = sides[1:] if self.names(sides[0]) else sides
        *exact, last = sides
        if (
            not all(sides)
            or len(sides) > 4
            or not all(self.values(reference, side, inner=True) for side in exact)
        ):
            return False
        return (
            self.approximation(reference, last)
            if "\\approx" in last
            else self.values(reference, last, inner=True)
        )

    def approximation(self, reference: str, answer: str) -> bool:
        r"""`\frac{1}{6} \approx 0.167` states both, and the decimal must be the rounding of what is no
        decimal."""
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
        return self.evaluated(
            lambda: expression.rounds_to(expression.read(exact), decimal.value, decimal.decimals)
        )

    def parts(self, reference: structures.Structure, answer: structures.Structure, inner: bool) -> bool:
        """Part by part.

        Sets within sets only by spelling: trying all pairs at every level takes exponential time.
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
        """Whether every part of either side equals one of the other."""
        if len(reference) > 20 or len(answer) > 20:
            return reference == answer
        pairs = [[self.values(r, a, inner=True) for a in answer] for r in reference]
        return all(map(any, pairs)) and all(map(any, zip(*pairs, strict=True)))

    def relations(self, reference: str, answer: str, comparable: bool) -> bool:
        def same() -> bool:
            try:
                relations.check(reference)
            except Unreadable:
                raise BadReferenceError(reference) from None
            return comparable and relations.equal(reference, answer)

        return self.spelled_alike(reference, answer) or self.evaluated(same)

    def expression_of_number(self, r: quantity.Quantity, reference: str, answer: str, raw: str) -> bool:
        """A number as reference and something unsimplified as answer: `\\sqrt{16}`, `2^3`; 3:4 for 3/4."""
        if (ratio := structures.ratio(answer)) is not None:
            exact = r.decimals < 0 and structures.clock(answer) is None and len(ratio) == 2 and ratio[1] != 0
            return exact and r.value == ratio[0] / ratio[1]
        answer, unit = split_unit(raw, self.context)
        answer = self.unnamed(answer, reference)
        if "," in answer or ":" in answer or (unit and r.unit and unit != r.unit):
            return False
        value = r.value / 100 if r.percent else r.value
        return self.expressions(f"{value.numerator}/{value.denominator}", answer)

    def without_units(self, raw: tuple[str, str], cleaned: tuple[str, str]) -> tuple[str, str]:
        """Both expressions without their units, the answer scaled to the reference's; no answer if they
        do not fit."""
        (_, wanted), (value, unit) = split_unit(raw[0], self.context), split_unit(raw[1], self.context)
        reference = self.unnamed(split_unit(raw[0], self.context)[0], cleaned[1]) if wanted else cleaned[0]
        answer = self.unnamed(value, cleaned[0]) if unit else cleaned[1]
        if not wanted or not unit or not wanted.dimensions or not unit.dimensions:
            return reference, answer
        if wanted.dimensions != unit.dimensions:
            return reference, ""
        scale = unit.size / wanted.size
        return reference, answer if scale == 1 else f"({scale.numerator}/{scale.denominator})({answer})"

    def expressions(self, reference: str, answer: str) -> bool:
        wanted = _read(reference)
        if self.spelled_alike(reference, answer):
            return True
        try:
            said = expression.read(answer)
        except Unreadable:
            return False
        if not said.symbols <= wanted.symbols:
            return False

        def same() -> bool:
            try:
                return expression.equal(wanted, said)
            except Unreadable:
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
    said = structures.ratio(answer)
    if said is not None:
        return said == reference
    number = quantity.parse(answer)
    if number is None or number.percent or number.unit or len(reference) != 2 or not reference[1]:
        return False
    return number.decimals < 0 and number.value == reference[0] / reference[1]
