r"""Expressions compared by value, in 150 digits at points chosen by seeded chance.

Complex points near the positive axis decide identities (`\sqrt{xy}` is `\sqrt{x}\sqrt{y}`), real points
of both signs the rest (`\sqrt{x^2}` is not `x`), where what is not real counts as undefined. Two
analytic functions that agree at a point that nobody chose agree everywhere; a relative tolerance of 90
digits tells 10^{-20} from 10^{-21}.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from trainer.rewards.grading.reader import Expression, read
from trainer.rewards.grading.values import CONTEXT, FINE, Node, Point, Undefined, Unreadable, value

__all__ = ["Expression", "Unreadable", "equal", "points", "proportional", "read", "readings", "rounds_to"]

_EQUAL = CONTEXT.mpf(10) ** -90


def points(*expressions: Expression) -> list[Point]:
    """Where these expressions are compared: all of them at the same points."""
    if not any(e.symbols for e in expressions):
        return [Point(0, "complex")]
    kinds = "complex" if all(e.analytic for e in expressions) else "positive", "signs", "opposite signs"
    return [Point(i // 2, kind) for i, kind in enumerate(kinds, 1)]


def readings(*expressions: Expression) -> tuple[int, ...]:
    r"""The bases to try for a bare `\log`."""
    return (0, 10) if any(e.bare_log for e in expressions) else (0,)


def equal(reference: Expression, answer: Expression) -> bool:
    """Whether two expressions have the same value everywhere. An answer may bring no symbol of its own."""
    if not answer.symbols <= reference.symbols:
        return False
    where = points(reference, answer)
    return any(_agree(reference, answer, where, base) for base in readings(reference, answer))


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
    finer, size = _gap(
        f, g, Point(point.seed, point.kind, FINE, base)
    )  # a zero shrinks with the digits, 10^-99 does not
    return bool(finer <= _EQUAL * size or finer <= _EQUAL * gap)


def _gap(f: Node, g: Node, point: Point) -> tuple[Any, Any]:
    a, b = value(f, point), value(g, point)
    return abs(a - b), max(abs(a), abs(b))


def proportional(first: Expression, second: Expression, base: int, positive: bool) -> bool:
    """Whether `first` is a number (a positive one) times `second`, the same one at every point."""
    factor, seen, context = None, 0, CONTEXT
    where = points(first, second)
    for point in [*where, replace(where[0], seed=len(where))]:  # any two are proportional at a single point
        at = replace(point, log_base=base)
        try:
            f, g = value(first.value, at), value(second.value, at)
        except Undefined:
            continue
        if abs(f) < context.mpf(10) ** -100 or abs(g) < context.mpf(10) ** -100:  # an identity states nothing
            return False
        factor, seen = f / g if factor is None else factor, seen + 1
        if abs(f / g - factor) > _EQUAL * abs(factor):
            return False
        if positive and not (factor.real > 0 and abs(factor.imag) <= _EQUAL * abs(factor)):
            return False
    return seen > 1 or (seen == 1 and not first.symbols)


def rounds_to(expression: Expression, decimal: Fraction, decimals: int) -> bool:
    """Whether a number, rounded to so many decimals, is this one."""
    point = Point(0, "complex")
    try:
        gap = value(expression.value, point) - CONTEXT.mpf(decimal.numerator) / decimal.denominator
    except Undefined:
        return False
    return not expression.symbols and bool(abs(gap) * 2 * CONTEXT.mpf(10) ** decimals <= 1)
