"""What an expression means: functions of a point, built by `reader.py`. Every size is bounded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mpmath.ctx_mp import MPContext

MAX_POWER_BITS = 1 << 22
"""Of a power or exponential: 2^4194304. What is beyond is a tower of powers."""
MAX_FACTORIAL = 100_000
MAX_ARGUMENT = 10**15
"""Of a sine: its period must be taken off in more digits the larger it is."""
MAX_TERMS = 1_000
"""Of a sum or product sign."""


class Unreadable(ValueError):
    """Not an expression, or one whose value is not cheap to find."""


class Undefined(ArithmeticError):
    """Not real at a real point."""


def _context(digits: int) -> Any:
    context = MPContext()
    context.dps = digits
    return context


DIGITS = 150
CONTEXT, FINE = _context(DIGITS), _context(2 * DIGITS)
"""Of 150 digits and, to tell a tiny number from zero, of 300."""


@dataclass(frozen=True)
class Point:
    """Values for the symbols."""

    seed: int
    kind: str
    """complex (right half plane), or real: positive, signs at random, the opposite signs."""
    context: Any = CONTEXT
    log_base: int = 0
    r"""Of a bare `\log`: 0 is natural, else 10. Both conventions are in use."""
    bound: dict[str, Any] = field(default_factory=dict)
    """Values of the indices of sums."""
    component: int = 0
    """Of vectors, whose cross product has two factors in different components."""

    def symbol(self, name: str) -> Any:
        """The symbol's value, a function of its name and the seed."""
        if name in self.bound:
            return self.bound[name]
        component = f"{self.component} " if self.component and name.startswith(("vec ", "hat ")) else ""
        draw = random.Random(f"{self.seed} {component}{name}")
        size = self.context.mpf(draw.randint(10**17, 4 * 10**17)) / 2**57
        if self.kind == "complex":
            return size * self.context.expjpi(self.context.mpf(draw.randint(-(10**17), 10**17)) / 10**18)
        return -size if self.kind == ("signs" if draw.random() < 0.5 else "opposite signs") else size


Node = Callable[[Point], Any]
"""An expression's value at a point. Raises Unreadable, Undefined or ArithmeticError."""


def value(node: Node, point: Point) -> Any:
    """A finite number. Raises Undefined where there is none, Unreadable where it is too expensive."""
    try:
        found = node(point)
    except (ZeroDivisionError, OverflowError, ValueError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Undefined from None
    if not point.context.isfinite(found):
        raise Undefined
    return found


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
    """In radians."""
    return lambda p: a(p) * p.context.pi / 180


def small(v: Any, p: Point, limit: float = MAX_ARGUMENT) -> Any:
    """The value itself. Raises Unreadable where it is above the limit."""
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
        b, e = base(p), small(exponent(p), p)
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
        v, n = radicand(p), small(degree(p), p)
        if v.imag == 0 and v.real < 0 and n.imag == 0 and n.real % 2 == 1:  # the real root, as on paper
            return -((-v) ** (1 / n))
        if _negative(v, p):
            raise Undefined
        return p.context.sqrt(v) if n == 2 else v ** (1 / n) if v else v

    return root


def log(argument: Node, base: Node | None) -> Node:
    r"""To a base, or as the point reads a bare `\\log`."""

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
        found = getattr(p.context, name)(small(argument(p), p, limit))
        if (
            p.kind != "complex"
            and name in ("asin", "acos", "acosh", "atanh", "asec", "acsc")
            and found.imag != 0
        ):
            raise Undefined
        return found

    return function


def series(name: str, index: str, first: Node, last: Node, term: Node) -> Node:
    """A sum or product over whole numbers."""

    def series(p: Point) -> Any:
        start, end = (int(small(bound(p), p).real) for bound in (first, last))
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
