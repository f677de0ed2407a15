r"""Compares expressions by value: by exact arithmetic where it can tell, else at points that a seed decides.

Whole powers, quotients and factorials of numbers and symbols are compared modulo large primes
(`exact.py`). Roots, sines and the like are evaluated in 150 digits, and in as many more as the sizes of
what was met ask for (`Point.reach`), so that `2^{1000} + \sqrt{2}` is not `2^{1000} - 1 + \sqrt{2}`.

Complex points near the positive axis decide identities (`\sqrt{xy}` is `\sqrt{x}\sqrt{y}`). Real points
of both signs, above 1 and below, decide the rest (`\sqrt{x^2}` is not `x`); what is not real counts as
undefined there. Two analytic functions that agree at a point that nobody chose agree everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

from trainer.rewards.grading.exact import PRIMES
from trainer.rewards.grading.expression_reader import Expression, read
from trainer.rewards.grading.values import (
    CONTEXT,
    DIGITS,
    Node,
    Point,
    Undefined,
    Unreadable,
    context_of,
    value,
)

__all__ = ["Expression", "Unreadable", "equal", "points", "proportional", "read", "readings", "rounds_to"]

Rule = Literal["exact", "points", "text"]
"""What decided: exact arithmetic, values at points, or the form of the texts."""

MODERATE = 60
"""Reach (`Point.reach`) of two expressions up to which 150 digits show every difference."""
MAX_DIGITS = 20_000
"""Most digits in which values are compared."""
_FAR = CONTEXT.mpf(10) ** -20
_EQUAL = CONTEXT.mpf(10) ** -90
_SMALL = CONTEXT.mpf(10) ** -50


class Undecided(ArithmeticError):
    """Two values agree in 150 digits, and more cannot be computed: one may be the other plus a trifle."""


def points(*expressions: Expression) -> list[Point]:
    """Points at which these expressions are compared, the same for all of them."""
    if not any(e.symbols for e in expressions):
        return [Point(0, "complex")]
    first = "complex" if all(e.analytic for e in expressions) else "positive"
    kinds = (first, "signs", "opposite signs")
    return [Point(i // 2, kind) for i, kind in enumerate(kinds, 1)]


def readings(*expressions: Expression) -> tuple[int, ...]:
    r"""Bases that are tried for a bare `\log`."""
    return (0, 10) if any(e.bare_log for e in expressions) else (0,)


def equal(reference: Expression, answer: Expression) -> bool:
    """Whether two expressions have the same value everywhere. The answer may have no symbol of its own.

    Raises Undecided.
    """
    if not answer.symbols <= reference.symbols:
        return False
    if rule(reference, answer) == "exact":
        return _agree_exactly(reference.value, answer.value)
    close = partial(_close, reference.value, answer.value)
    compared_at = points(reference, answer)
    for base in readings(reference, answer):
        if _agree_at((replace(point, log_base=base) for point in compared_at), close):
            return True
    return False


def rule(*expressions: Expression) -> Rule:
    """What decides about these expressions."""
    return "exact" if all(e.exact for e in expressions) else "points"


def _agree_exactly(f: Node, g: Node) -> bool:
    """Whether two nodes are the same number modulo every prime."""
    return _agree_at(
        [Point(1, "residue", ring) for ring in PRIMES], lambda p: value(f, p).number == value(g, p).number
    )


def _agree_at(points: Iterable[Point], same: Callable[[Point], bool]) -> bool:
    """Whether two values are the same wherever both have one, and that they have one anywhere."""
    seen = False
    for point in points:
        with suppress(Undefined):
            if not same(point):
                return False
            seen = True
    return seen


def _close(f: Node, g: Node, point: Point) -> bool:
    """Whether two nodes have the same value at a point, in as many digits as their sizes ask for."""
    gap, size, reach = _gap(f, g, point, DIGITS)
    far = gap > _FAR * size and gap > _SMALL
    # 2^{1000} and 2^{1000} - 1 differ after 301 digits.
    digits = DIGITS + (int(2 * reach) if reach > MODERATE else 0)
    if far and (reach < DIGITS / 4 or digits > MAX_DIGITS):
        return False
    if digits > MAX_DIGITS:
        raise Undecided
    if digits > DIGITS:
        gap, size, _ = _gap(f, g, point, digits)
    tolerance = CONTEXT.mpf(10) ** (60 - digits + int(reach))
    if gap <= tolerance * size:
        return True
    if gap > _SMALL:
        return False
    # With more digits a zero shrinks, 10^-99 does not.
    finer, size, _ = _gap(f, g, point, 2 * digits)
    return bool(finer <= tolerance * size or finer <= tolerance * gap)


def _gap(f: Node, g: Node, point: Point, digits: int) -> tuple[Any, Any, float]:
    """Difference and size of two values in this many digits, and the reach of both."""
    rounded_up = DIGITS * -(-digits // DIGITS)
    point = replace(point, context=context_of(rounded_up), reach=[0.0])
    a, b = value(f, point), value(g, point)
    return abs(a - b), max(abs(a), abs(b)), point.reach[0]


def proportional(first: Expression, second: Expression, base: int, positive: bool) -> bool:
    """Whether `first` is the same number (a positive one if `positive`) times `second` at every point.

    Raises Undecided.
    """
    f, g = first.value, second.value

    def same_quotient(at: Point, where: Callable[[Node, Node], bool]) -> bool:
        return where(_Product("*", (f, g), "", at), _Product("*", (g, f), "", at))

    exactly = rule(first, second) == "exact"
    if exactly and not same_quotient(Point(2, "residue"), _agree_exactly):
        return False

    compared_at = points(first, second)
    # Any two are proportional at a single point.
    compared_at.append(replace(compared_at[0], seed=len(compared_at)))
    start = None
    for compared in compared_at:
        point = replace(compared, log_base=base)
        try:
            if _is_zero(f, point) or _is_zero(g, point):  # an identity states nothing
                return False
            if start is None:
                start = point
                factor = value(f, point) / value(g, point)
                if positive and not (factor.real > 0 and abs(factor.imag) <= _EQUAL * abs(factor)):
                    return False
            elif not exactly and not same_quotient(start, partial(_close, point=point)):
                return False
        except Undefined:
            continue
        seen_twice = start is not point
        if seen_twice and exactly:
            return True
    return start is not None


@dataclass(frozen=True, slots=True)
class _Product(Node):
    """The product of its first part and of what its second part is at another point."""

    elsewhere: Point = Point(0, "complex")

    def at(self, p: Point) -> Any:
        """`Node.at`."""
        f, g = self.parts
        return f.at(p) * g.at(replace(self.elsewhere, context=p.context, reach=p.reach, terms=[0]))


def _is_zero(f: Node, point: Point) -> bool:
    """Whether a value is zero, and not just small."""
    v = abs(value(f, point))
    if v > _SMALL:
        return False
    return bool(abs(value(f, replace(point, context=context_of(2 * DIGITS)))) <= _EQUAL * v)


def rounds_to(expression: Expression, decimal: Fraction, decimals: int) -> bool:
    """Whether an expression, rounded to `decimals` digits after the point, is `decimal`."""
    point = Point(0, "complex")
    try:
        gap = value(expression.value, point) - CONTEXT.mpf(decimal.numerator) / decimal.denominator
    except Undefined:
        return False
    return not expression.symbols and bool(abs(gap) * 2 * CONTEXT.mpf(10) ** decimals <= 1)
