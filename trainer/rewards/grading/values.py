"""What an expression means: functions of a point, built by `reader.py`. Every size is bounded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mpmath.ctx_mp import MPContext

MAX_POWER_BITS = 1 << 22
"""Bits of a power or exponential: 2^4194304. What is beyond is a tower of powers."""
MAX_FACTORIAL = 100_000
MAX_ARGUMENT = 10**15
"""Largest argument of a sine: the larger it is, the more digits its reduction takes."""
MAX_TERMS = 1_000
"""Most terms of a sum or product sign."""


class Unreadable(ValueError):
    """The text is not an expression, or its value is not cheap to compute."""


class Undefined(ArithmeticError):
    """The value is not real at a real point."""


def _context(digits: int) -> Any:
    context = MPContext()
    context.dps = digits
    return context


DIGITS = 150
CONTEXT = _context(DIGITS)
FINE = _context(2 * DIGITS)
"""A context of twice as many digits, which shows whether a tiny number is zero."""


@dataclass(frozen=True)
class Point:
    """Values for the symbols."""

    seed: int
    kind: str
    """complex (right half plane), or real: positive, signs (drawn at random), opposite signs."""
    context: Any = CONTEXT
    log_base: int = 0
    r"""Base of a bare `\log`: 0 means natural, else 10. Both conventions are in use."""
    bound: dict[str, Any] = field(default_factory=dict)
    """Values of the indices of sums."""
    component: int = 0
    """Component of vectors; the two factors of a cross product are in different ones."""

    def symbol(self, name: str) -> Any:
        """Value of a symbol, which is a function of its name and the seed."""
        if name in self.bound:
            return self.bound[name]
        component = f"{self.component} " if self.component and name.startswith(("vec ", "hat ")) else ""
        draw = random.Random(f"{self.seed} {component}{name}")
        size = self.context.mpf(draw.randint(10**17, 4 * 10**17)) / 2**57
        if self.kind == "complex":
            return size * self.context.expjpi(self.context.mpf(draw.randint(-(10**17), 10**17)) / 10**18)
        negative_kind = "signs" if draw.random() < 0.5 else "opposite signs"
        return -size if self.kind == negative_kind else size


Node = Callable[[Point], Any]
"""An expression's value at a point. Raises Unreadable, Undefined or ArithmeticError."""


def value(node: Node, point: Point) -> Any:
    """Value of a node, a finite number.

    Raises Undefined if there is none, Unreadable if it is too expensive.
    """
    try:
        number = node(point)
    except (ZeroDivisionError, OverflowError, ValueError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Undefined from None
    if not point.context.isfinite(number):
        raise Undefined
    return number


def constant(digits: str) -> Node:
    return lambda p: p.context.mpf(digits)


def plus(a: Node, b: Node) -> Node:
    return lambda p: a(p) + b(p)


def minus(a: Node, b: Node) -> Node:
    return lambda p: a(p) - b(p)


def times(a: Node, b: Node) -> Node:
    return lambda p: a(p) * b(p)


def cross(a: Node, b: Node) -> Node:
    """The cross product of vectors: linear in both, and `-(b x a)`."""

    def cross(p: Point) -> Any:
        q = replace(p, component=p.component + 1)
        return a(p) * b(q) - b(p) * a(q)

    return cross


def over(a: Node, b: Node) -> Node:
    return lambda p: a(p) / b(p)


def degrees(a: Node) -> Node:
    """An angle in degrees, as radians."""
    return lambda p: a(p) * p.context.pi / 180


def small(v: Any, p: Point, limit: float = MAX_ARGUMENT) -> Any:
    """`v` itself. Raises Unreadable if it is above the limit."""
    if not p.context.isfinite(v):
        raise Undefined
    if abs(v) > limit:
        raise Unreadable("too large a number")
    return v


def _negative(v: Any, p: Point) -> bool:
    return p.kind != "complex" and v.imag == 0 and v.real < 0


def power(base: Node, exponent: Node) -> Node:
    """`base^exponent`; undefined for a negative base and a broken exponent at a real point."""

    def power(p: Point) -> Any:
        b = base(p)
        e = small(exponent(p), p)
        if b == 0:
            return b**e if e.imag == 0 and e.real > 0 else _undefined()
        if abs(e) * (abs(p.context.ln(b)) + 1) > MAX_POWER_BITS:
            raise Unreadable("a tower of powers")
        if _negative(b, p) and (e.imag != 0 or e.real != p.context.floor(e.real)):
            raise Undefined
        return b**e

    return power


def _undefined() -> Any:
    raise Undefined


def root(radicand: Node, degree: Node) -> Node:
    """The real root of odd degree, else the principal one."""

    def root(p: Point) -> Any:
        v = radicand(p)
        n = small(degree(p), p)
        if v.imag == 0 and v.real < 0 and n.imag == 0 and n.real % 2 == 1:  # the real root, as on paper
            return -((-v) ** (1 / n))
        if _negative(v, p):
            raise Undefined
        return p.context.sqrt(v) if n == 2 else v ** (1 / n) if v else v

    return root


def log(argument: Node, base: Node | None) -> Node:
    r"""Logarithm to a base, or as the point reads a bare `\\log`."""

    def log(p: Point) -> Any:
        v = argument(p)
        if _negative(v, p):
            raise Undefined
        if base is not None:
            return p.context.ln(v) / p.context.ln(base(p))
        return p.context.ln(v) / p.context.ln(p.log_base) if p.log_base else p.context.ln(v)

    return log


def function(name: str, argument: Node) -> Node:
    """One of mpmath's functions of one number."""
    if name in ("ln", "lg"):
        return log(argument, constant("10") if name == "lg" else lambda p: +p.context.e)

    def function(p: Point) -> Any:
        limit = MAX_POWER_BITS if name.endswith(("exp", "h")) else MAX_ARGUMENT
        result = getattr(p.context, name)(small(argument(p), p, limit))
        partly_real = name in ("asin", "acos", "acosh", "atanh", "asec", "acsc")
        if p.kind != "complex" and partly_real and result.imag != 0:
            raise Undefined
        return result

    return function


def series(name: str, index: str, first: Node, last: Node, term: Node) -> Node:
    """A sum or product over whole numbers."""

    def series(p: Point) -> Any:
        start = int(small(first(p), p).real)
        end = int(small(last(p), p).real)
        if end - start >= MAX_TERMS or (first(p), last(p)) != (start, end):
            raise Unreadable("too many terms, or no number of them")
        total = p.context.mpf(name == "prod")
        for k in range(start, end + 1):
            v = term(replace(p, bound={**p.bound, index: p.context.mpf(k)}))
            total = total * v if name == "prod" else total + v
        return total

    return series


def factorial(argument: Node) -> Node:
    return lambda p: p.context.factorial(small(argument(p), p, MAX_FACTORIAL))


def binomial(over: Node, under: Node) -> Node:
    """`n` over `k`."""
    return lambda p: p.context.binomial(small(over(p), p, MAX_FACTORIAL), small(under(p), p, MAX_FACTORIAL))
