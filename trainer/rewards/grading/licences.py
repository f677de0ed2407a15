r"""The licences: as what a reply may be read for each kind of reference answer.

`Comparison.of_kind` is the table. Whatever it does not license is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from trainer.rewards.grading import (
    expression,
    kinds,
    naming,
    option_letters,
    quantity,
    relations,
    shape,
    structures,
)
from trainer.rewards.grading.dates import same_time, time_of_day
from trainer.rewards.grading.expression import Rule, Unreadable
from trainer.rewards.grading.kinds import BadReferenceError, Kind, read_kind
from trainer.rewards.grading.measurement_units import Unit, in_radians, split_unit
from trainer.rewards.grading.notation import common_notation
from trainer.rewards.grading.quantity import Quantity
from trainer.rewards.grading.question import Asked, spelling


class NeedsEvaluation(Exception):
    """Only the value of an expression decides, and the caller wants no evaluation."""


_APPROXIMATELY = re.compile(r"\s*\\approx(?![a-zA-Z])\s*")
_MIXED = re.compile(r"(-?[0-9]+) and (?:([0-9]+)/([0-9]+)|\\frac\{([0-9]+)\}\{([0-9]+)\})(?![0-9/])")
_YEAR = re.compile(r"(?:the )?year (?=[0-9]{3,4}\Z)", re.IGNORECASE)


def _is_one(structure: structures.Structure | None) -> bool:
    return structure is not None and structure.kind == "set" and len(structure.parts) == 1


@dataclass(frozen=True)
class Comparison:
    """One reference answer against one box."""

    question: str
    context: str
    """Question and reference answer, from which nouns and names come."""
    asked: Asked
    evaluate: bool
    by_spelling: bool
    """Whether equal texts count as equal values without evaluation."""
    rules: set[Rule]
    """What decided so far."""

    def same(self, reference: str, answer: str, step: bool = False) -> bool:
        """Compares a part of the reference answer with one of the answer.

        step: whether a result follows the answer's part, in which sums may be left.
        """
        return self.of_kind(read_kind(reference, "", self.context), reference, answer, True, step)

    def of_kind(
        self, kind: Kind, reference: str, answer: str, inner: bool = False, step: bool = False
    ) -> bool:
        """The licences: reads the answer as the reference's kind, and as nothing else."""
        match kind:
            case kinds.Letters(letters):
                return option_letters.names_letters(answer, letters, self.question)
            case kinds.Words():
                return option_letters.same_words(reference, answer, self.question)
            case kinds.Exactly(name, key):
                return kinds.key_of(name, answer) == key
            case kinds.Time(time):
                given = time_of_day(self.unnamed(common_notation(answer), reference))
                return given is not None and same_time(time, given)
            case kinds.ValueRange():
                ends = kinds.range_of(common_notation(answer), self.context)
                return ends is not None and all(map(_same_end, (kind.low, kind.high), ends))
            case kinds.Bound(sign, value):
                bound = kinds.bound_of(common_notation(answer), self.context)
                return bound is not None and bound[0] == sign and quantity.equal(value, bound[1])
        return self.mathematics(kind, reference, option_letters.in_symbols(answer), inner, step)

    def mathematics(self, kind: Kind, reference: str, answer: str, inner: bool, step: bool) -> bool:
        """The licences of the kinds whose value counts."""
        raw = reference, answer
        if isinstance(kind, kinds.Condition):
            reference = kind.text  # `all real numbers` in symbols
        reference, answer = common_notation(reference), common_notation(answer)
        reference, answer = self.unnamed(reference, answer), self.unnamed(answer, reference)
        reference, answer = naming.function_bodies(reference, answer)
        if isinstance(kind, kinds.Condition) and not relations.is_relation(reference):
            return self.same(reference, answer)  # `x = 5` without its name
        match kind:
            case kinds.Number(number):
                return self.number(number, reference, answer, raw[1], inner, step)
            case kinds.Ratio(parts):
                return self.ratio(parts, answer)
            case kinds.Collection():
                return self.collection(kind, reference, answer, inner)
            case kinds.Condition():
                given = structures.parse(answer)
                return self.relations(reference, answer, relations.is_relation(answer) or given is not None)
            case kinds.Formula():
                return self.formula(reference, answer, raw, inner, step)
        return False

    def unnamed(self, s: str, other: str) -> str:
        return naming.strip_name(s, other, self.context)

    def number(
        self, number: Quantity, reference: str, answer: str, raw: str, inner: bool, step: bool
    ) -> bool:
        """A number's licences: a number of this value, in the form and unit that the question asks for; a
        root or power of it, an angle in radians, a set of it; a chain or an approximation that ends in it."""
        if not inner:
            answer = _MIXED.sub(r"\1\\frac{\2\4}{\3\5}", answer)
            if 999 < abs(number.value) < 3000 and number.form == "plain" and number.unit is None:
                answer = _YEAR.sub("", answer, count=1)
        if (given := quantity.parse(answer, self.context)) is not None:
            self.rules.add("exact")
            if given.divides and not (step or number.divides):
                return False
            asked_so = inner or _has_asked_form(self.asked, number, given)
            return asked_so and quantity.equal(number, given)
        restated = self.restated(reference, answer, inner)
        if restated is not None or (not inner and not self.asked.forms.isdisjoint(_DONE)):
            return restated is True
        return self.expression_of_number(number, reference, answer, raw, step)

    def restated(self, reference: str, answer: str, inner: bool) -> bool | None:
        """Whether the reference is the answer in degrees or radians, the one member of its set, or what its
        chain or approximation ends in; False for another relation, None for what is none of these."""
        if (angles := in_radians(reference, answer)) is not None:
            return self.expressions(*angles)
        if (structure := structures.parse(answer)) is not None:
            return _is_one(structure) and self.same(reference, structure.parts[0])
        if "=" in answer:
            return not inner and self.chain(reference, answer)
        if _APPROXIMATELY.search(answer):
            return not inner and self.approximation(reference, answer)
        return False if relations.is_relation(answer) else None

    def expression_of_number(
        self, number: Quantity, reference: str, answer: str, raw: str, step: bool
    ) -> bool:
        """Whether an answer that is no number as it stands equals one: `\\sqrt{16}`, `2^3`; 3:4 for 3/4.

        Work that is left undone is none: a policy that need not do it learns not to.
        """
        ratio = structures.ratio(answer)
        if ratio is not None and isinstance(ratio[0], quantity.Fraction):
            return time_of_day(answer) is None and number.decimals < 0 and _is_quotient(ratio, number)
        answer, unit = split_unit(raw, self.context)
        answer = self.unnamed(answer, reference)
        if "," in answer or ":" in answer or (unit and number.unit and unit != number.unit):
            return False
        value = number.value / 100 if number.percent else number.value
        return self.expressions(
            f"{value.numerator}/{value.denominator}",
            answer,
            lambda _, given: (
                step or (not given.arithmetic and shape.is_stated(given.value, value.denominator == 1))
            ),
        )

    def collection(self, kind: kinds.Collection, reference: str, answer: str, inner: bool) -> bool:
        """A collection's licences: one of the same brackets, part by part; the inequality of an interval; the
        chain of inequalities of an ordered list; the value of a set that has one."""
        wanted = structures.parse(reference) or kind.structure  # without its name, where the answer has none
        if kind.ordered:
            return self.ordered(wanted.parts, answer)
        if not self.allows_or(reference, answer):
            return False
        given = structures.parse(answer)
        if given is None and _LOOSE.sub("", answer).lower() == _LOOSE.sub("", reference).lower():
            return not any(map(str.isdigit, answer))  # `Washington D.C.`
        if given is not None and _is_one(wanted) == _is_one(given):
            return self.parts(wanted, given, inner)
        if relations.is_relation(answer):
            interval = wanted.kind in structures.INTERVALS and len(wanted.parts) == 2
            return interval and self.relations(reference, answer, True)
        if _is_one(wanted):
            return self.same(wanted.parts[0], answer)
        return _is_one(given) and given is not None and self.of_kind(kind, reference, given.parts[0], True)

    def allows_or(self, reference: str, answer: str) -> bool:
        """Whether an answer may join values by "or", as solutions of an equation are; else it is a hedge."""
        if "=" in answer or not _OR.search(answer) or _OR.search(reference):
            return True
        solutions = structures.parse(reference)
        words = solutions and any(map(option_letters.is_text, solutions.parts))
        return not words and not _AND.search(reference) and _SOLVED.search(self.question) is not None

    def ordered(self, parts: tuple[str, ...], answer: str) -> bool:
        """Whether an answer lists the parts in their order, between commas or signs of one direction."""
        signs = set(_DIRECTION.findall(answer))
        if len(signs) == 1 and "," not in answer:
            given = tuple(map(str.strip, _DIRECTION.split(answer)[::2]))
            low, high = (quantity.parse(given[end], self.context) for end in (0, -1))
            if low and high and (low.value < high.value) == (signs <= {">", "\\ge"}):
                return False  # 3 < 2
        else:
            listed = structures.parse(_GOES_ON.sub("", answer))
            given = listed.parts if listed and listed.kind in ("list", "set", "()") else ()
        return len(given) == len(parts) and all(map(self.same, parts, given))

    def formula(self, reference: str, answer: str, raw: tuple[str, str], inner: bool, step: bool) -> bool:
        """An expression's licences: one of the same value, in the form that the question asks for, with no
        arithmetic left that the reference has done; a chain or an approximation that ends in it."""
        if (restated := self.restated(reference, answer, inner)) is not None:
            return restated
        bare_reference, scale, bare_answer = self.without_units(raw, (reference, answer))

        def allowed(wanted: expression.Expression, given: expression.Expression) -> bool:
            given = expression.read(bare_answer) if scale else given
            if shape.folds(given.value) > shape.folds(wanted.value) and not step:
                return False
            return inner or shape.has_asked_form(self.asked.forms, wanted, given)

        return self.expressions(bare_reference, scale + bare_answer, allowed)

    def ratio(self, reference: structures.Ratio, answer: str) -> bool:
        """A ratio's licences: one of numbers, and their quotient; where the reference has expressions, one
        whose terms have the same quotients by the first one: `a:b` and `2a:2b`."""
        if (given := structures.ratio(answer)) is None:
            number = quantity.parse(answer)
            stated = number is not None and not number.percent and not number.unit and number.decimals < 0
            return stated and number is not None and _is_quotient(reference, number)
        if given == reference or isinstance(reference[0], quantity.Fraction):
            return given == reference
        if len(reference) != len(given):
            return False
        first = [f"({part})/({reference[0]})" for part in reference[1:]]
        return all(map(self.expressions, first, [f"({part})/({given[0]})" for part in given[1:]]))

    def chain(self, reference: str, answer: str) -> bool:
        """Whether all sides of a chain are the reference: `x = \\frac12 = 0.5`, but not `61 = 60` or `A
        = B`."""
        sides = re.split(r"\s*=\s*", answer)
        if naming.may_name(sides[0], reference, self.context):
            sides = sides[1:]
        if not all(sides) or len(sides) > 4:
            return False
        *exact, last = sides
        if not all(self.same(reference, side, step=True) for side in exact):
            return False
        if "\\approx" in last:
            return self.approximation(reference, last)
        return self.of_kind(read_kind(reference, "", self.context), reference, last, True)

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
        if not any(self.same(reference, side, step=True) for side in stated):
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
                return all(map(self.same, reference.parts, answer.parts))
            case "unordered" if inner:
                return set(reference.parts) == set(answer.parts)
            case "unordered":
                return self.cover(reference.parts, answer.parts)
        return False

    def cover(self, reference: tuple[str, ...], answer: tuple[str, ...]) -> bool:
        """Whether every part of either side equals a part of the other side."""
        if len(reference) > 20 or len(answer) > 20:
            return reference == answer
        pairs = [[self.same(r, a) for a in answer] for r in reference]
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
            if "equation" in self.asked.forms and not relations.is_as_long(reference, answer):
                return False
            self.rules.add(relations.rule(reference, answer))
            return relations.equal(reference, answer)

        return self.spelled_alike(reference, answer) or self.evaluated(same)

    def without_units(self, raw: tuple[str, str], cleaned: tuple[str, str]) -> tuple[str, str, str]:
        """Reference and answer without units, and between them a factor from one unit to the other.

        The answer is empty if the units do not fit.
        """
        bare_reference, wanted = split_unit(raw[0], self.context)
        bare_answer, unit = split_unit(raw[1], self.context)
        reference = self.unnamed(bare_reference, cleaned[1]) if wanted else cleaned[0]
        answer = self.unnamed(bare_answer, cleaned[0]) if unit else cleaned[1]
        if not wanted or not unit or not wanted.dimensions or not unit.dimensions:
            return reference, "", answer
        if wanted.dimensions != unit.dimensions or wanted.size == unit.size:
            return reference, "", answer if wanted.dimensions == unit.dimensions else ""
        scale = unit.size / wanted.size
        return reference, f"({scale.numerator}/{scale.denominator})", f"({answer})"

    def expressions(self, reference: str, answer: str, allowed: Allowed = lambda *_: True) -> bool:
        """Whether two expressions have the same value, and the answer a form that is allowed."""
        try:
            wanted = expression.read(reference)
        except Unreadable as error:
            raise BadReferenceError(f"{reference[:80]!r}: {error}") from None
        if self.spelled_alike(reference, answer):
            return True
        try:
            given = expression.read(answer)
        except Unreadable:
            return False
        if not given.symbols <= wanted.symbols or not allowed(wanted, given):
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

    def evaluated(self, compare: Callable[[], bool]) -> bool:
        if not self.evaluate:
            raise NeedsEvaluation
        try:
            return compare()
        except Unreadable:
            return False


_DONE = ("evaluated", "simplified", "decimal", "rounded")
"""Forms for which a number is written as one, and as no root or power."""
Allowed = Callable[[expression.Expression, expression.Expression], bool]
_OR = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])")
_AND = re.compile(r"(?<![A-Za-z\\])and(?![A-Za-z])")
_SOLVED = re.compile(r"\A\Z|=|\b(?:solv|solution|root|zero|value|equation)", re.IGNORECASE)
_GOES_ON = re.compile(r",\s*(?:\.\.\.|\\l?dots)\s*\Z")
_LOOSE = re.compile(r"[\s,]+")
_DIRECTION = re.compile(r"\s*(<|>|\\le(?![a-z])|\\ge(?![a-z])|\\to(?![a-z])|->)\s*")


def _same_end(reference: Quantity, answer: Quantity) -> bool:
    """Whether one end of a range is another; a percent sign or unit of the upper end holds for both."""
    same_unit = reference.unit is None or answer.unit is None or reference.unit == answer.unit
    zeros = reference.written.startswith(_ZEROS) == answer.written.startswith(_ZEROS)
    return same_unit and zeros and reference.value == answer.value


_ZEROS = tuple(f"0{digit}" for digit in range(10))
"""How digits begin that are no plain number: `0-05` is not 0-5."""


def _has_asked_form(wanted: Asked, reference: Quantity, answer: Quantity) -> bool:
    """Whether a number has the form and unit that the question asks for, as far as the reference has them."""
    if answer.unit is not None and reference.unit is None and not _is_asked_unit(wanted, answer.unit):
        return False
    forms = wanted.forms
    of_another = wanted.units or wanted.counted or wanted.percents
    if answer.percent and not reference.percent and of_another and "share" not in forms:
        return False
    if "converted" in forms and answer.unit and reference.unit and answer.unit.size != reference.unit.size:
        return False
    if "percent" in forms and reference.percent:
        return answer.percent or answer.value == reference.value
    match reference.form:
        case "scientific" if "scientific" in forms:
            return answer.form == "scientific" and quantity.is_normalized(answer)
        case "mixed" if "mixed" in forms:
            return answer.form == "mixed"
        case "fraction" if "simplified" in forms:
            return answer.form == "fraction" and quantity.is_reduced(answer)
        case "fraction" if "fraction" in forms:
            return answer.form in ("fraction", "mixed") and not answer.percent
        case "plain" if not forms.isdisjoint(("decimal", "rounded")):
            return answer.form == "plain" and answer.percent == reference.percent
        case "plain" if answer.form == "fraction":  # 42/8 for 5.25 is a division left undone
            return quantity.is_reduced(answer) or _TENTHS.search(answer.written) is not None
    return True


_TENTHS = re.compile(r"(?<![0-9])10*\}?$")


def _is_asked_unit(wanted: Asked, unit: Unit) -> bool:
    counted = {name for name, power in unit.dimensions if power > 0}
    named = unit in wanted.units or not wanted.counted.isdisjoint(counted)
    return named or not (wanted.units or wanted.counted)


def _is_quotient(ratio: structures.Ratio | None, number: Quantity) -> bool:
    """Whether a ratio of two numbers is a fraction."""
    match ratio:
        case (quantity.Fraction() as top, quantity.Fraction() as bottom) if bottom:
            return number.value == top / bottom
    return False


def is_spelled_alike(kind: Kind, reference: str, answer: str, question: str) -> bool:
    """Whether an answer is spelled as the reference is, but for units, names and the order of a set."""
    if isinstance(kind, kinds.Number):
        context = f"{question} {reference}"
        number = quantity.parse(naming.strip_name(common_notation(answer), reference, context), context)
        wanted = kind.quantity
        if number is None:
            return spelling(reference) == spelling(answer)
        plain = number.form == "plain" and number.value == wanted.value
        same_unit = number.unit is None or wanted.unit is None or number.unit.size == wanted.unit.size
        same_number = (number.form, number.percent) == (wanted.form, wanted.percent)
        return same_number and same_unit and (plain or number.written == wanted.written)
    if isinstance(kind, kinds.Collection):
        answered = structures.parse(answer)
        given = list(map(spelling, answered.parts)) if answered else []
        wanted_parts = list(map(spelling, kind.structure.parts))
        return given == wanted_parts or (not kind.ordered and sorted(given) == sorted(wanted_parts))
    bare = naming.strip_name(common_notation(reference), common_notation(answer), question)
    return spelling(answer) in (spelling(reference), spelling(bare))
