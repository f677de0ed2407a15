r"""Compares expressions by value, in 150 digits at points that a seed decides.

Complex points near the positive axis decide identities (`\sqrt{xy}` is `\sqrt{x}\sqrt{y}`). Real points
of both signs decide the rest (`\sqrt{x^2}` is not `x`); what is not real counts as undefined there. Two
analytic functions that agree at a point that nobody chose agree everywhere. A relative tolerance of 90
digits distinguishes 10^{-20} from 10^{-21}.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from trainer.rewards.grading.reader import Expression, read
from trainer.rewards.grading.values import CONTEXT, FINE, Node, Point, Undefined, Unreadable, value

__all__ = ["Expression", "Unreadable", "equal", "points", "proportional", "read", "readings", "rounds_to"]

_EQUAL = CONTEXT.mpf(10) ** -90
_ZERO = CONTEXT.mpf(10) ** -100


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
    """Whether two expressions have the same value everywhere. The answer may have no symbol of its own."""
    if not answer.symbols <= reference.symbols:
        return False
    compared_at = points(reference, answer)
    return any(_agree(reference, answer, compared_at, base) for base in readings(reference, answer))


def _agree(first: Expression, second: Expression, where: list[Point], base: int) -> bool:
    seen = False
    for point in where:
        try:
            if not _close(first.value, second.value, point, base):
                return False
            seen = True
        except Undefined:
            continue
    return seen


def _close(f: Node, g: Node, point: Point, base: int) -> bool:
    gap, size = _gap(f, g, Point(point.seed, point.kind, CONTEXT, base))
    if gap <= _EQUAL * size:
        return True
    if gap > CONTEXT.mpf(10) ** -50:
        return False
    # With more digits a zero shrinks, 10^-99 does not.
    finer, size = _gap(f, g, Point(point.seed, point.kind, FINE, base))
    return bool(finer <= _EQUAL * size or finer <= _EQUAL * gap)


def _gap(f: Node, g: Node, point: Point) -> tuple[Any, Any]:
    a = value(f, point)
    b = value(g, point)
    return abs(a - b), max(abs(a), abs(b))


def proportional(first: Expression, second: Expression, base: int, positive: bool) -> bool:
    """Whether `first` is the same number (a positive one if `positive`) times `second` at every point."""
    factor = None
    seen = 0
    compared_at = points(first, second)
    # Any two are proportional at a single point.
    compared_at.append(replace(compared_at[0], seed=len(compared_at)))
    for compared in compared_at:
        point = replace(compared, log_base=base)
        try:
            f = value(first.value, point)
            g = value(second.value, point)
        except Undefined:
            continue
        if abs(f) < _ZERO or abs(g) < _ZERO:  # an identity states nothing
            return False
        if factor is None:
            factor = f / g
        seen += 1
        if abs(f / g - factor) > _EQUAL * abs(factor):
            return False
        if positive and not (factor.real > 0 and abs(factor.imag) <= _EQUAL * abs(factor)):
            return False
    return seen > 1 or (seen == 1 and not first.symbols)


def rounds_to(expression: Expression, decimal: Fraction, decimals: int) -> bool:
    """Whether an expression, rounded to `decimals` digits after the point, is `decimal`."""
    point = Point(0, "complex")
    try:
        gap = value(expression.value, point) - CONTEXT.mpf(decimal.numerator) / decimal.denominator
    except Undefined:
        return False
    return not expression.symbols and bool(abs(gap) * 2 * CONTEXT.mpf(10) ** decimals <= 1)
