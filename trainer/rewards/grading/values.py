"""What an expression means: functions of a point, built by `expression_reader.py`. Every size is bounded."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mpmath.ctx_mp import MPContext

from trainer.rewards.grading import exact
from trainer.rewards.grading.exact import EXACT, FRACTIONS, Inexact

MAX_POWER_BITS = 1 << 22
"""Bits of a power or exponential: 2^4194304. What is beyond is a tower of powers."""
MAX_FACTORIAL = 100_000
MAX_ARGUMENT = 10**15
"""Largest argument of a sine: the larger it is, the more digits its reduction takes."""
MAX_TERMS = 5_000
"""Most terms of all sums and products of one expression, those inside of others counted each time."""


class Unreadable(ValueError):
    """The text is not an expression, or its value is not cheap to compute."""


class Undefined(ArithmeticError):
    """The value is not real at a real point."""


@lru_cache(maxsize=64)
def context_of(digits: int) -> Any:
    """mpmath's arithmetic of so many digits."""
    context = MPContext()
    context.dps = digits
    return context


DIGITS = 150
CONTEXT = context_of(DIGITS)


@dataclass(frozen=True)
class Point:
    """Values for the symbols."""

    seed: int
    kind: str
    """complex (right half plane), or real: positive, signs (drawn at random), opposite signs. With opposite
    signs symbols are below 1, with the first signs above 1."""
    context: Any = CONTEXT
    """mpmath's arithmetic, or one of `exact.EXACT`."""
    log_base: int = 0
    r"""Base of a bare `\log`: 0 means natural, else 10. Both conventions are in use."""
    bound: dict[str, int] = field(default_factory=dict)
    """Values of the indices of sums."""
    reach: list[float] = field(default_factory=lambda: [0.0], compare=False)
    """One number: the decimal digits of all that was met at this point, the exponents of powers included.
    No difference of two of its values is smaller by more digits, unless by chance."""
    terms: list[int] = field(default_factory=lambda: [0], compare=False)
    """One number: how many terms of sums and products the expression has taken so far at this point."""

    def symbol(self, name: str) -> Any:
        """Value of a symbol, which is a function of its name and the seed."""
        if name in self.bound:
            return self.context.mpf(self.bound[name])
        if isinstance(self.context, EXACT):
            return self.context.symbol(name, self.seed)
        draw = random.Random(f"{self.seed} {name}")
        self.reach[0] += 0.5
        drawn = self.context.mpf(draw.randint(10**17, 4 * 10**17))
        if self.kind == "complex":
            size = drawn / 2**57  # 0.7 to 2.8
            return size * self.context.expjpi(self.context.mpf(draw.randint(-(10**17), 10**17)) / 10**18)
        size = drawn / (2**59 if self.kind == "opposite signs" else 2**56)
        negative_kind = "signs" if draw.random() < 0.5 else "opposite signs"
        return -size if self.kind == negative_kind else size

    def met(self, value: Any) -> Any:
        """The value itself, whose size is noted."""
        self.reach[0] += 0.302 * abs(self.context.mag(value)) if value else 0.0
        return value


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of an expression: what it does, and to which parts."""

    operation: str
    """`number`, `symbol`, `+`, `-`, `negative`, `*`, `/`, `^`, `root`, `mixed`, `degrees`, or the name of a
    function."""
    parts: tuple[Node, ...] = ()
    text: str = ""
    """Digits of a number, name of a symbol, index of a sum."""

    def at(self, p: Point) -> Any:
        """The value at a point. Raises Unreadable, Undefined or ArithmeticError."""
        return _OPERATIONS.get(self.operation, _function)(self, p)


def value(node: Node, point: Point) -> Any:
    """Value of a node, a finite number.

    Raises Undefined if there is none, Unreadable if it is too expensive.
    """
    point.terms[0] = 0
    try:
        number = node.at(point)
    except (ZeroDivisionError, OverflowError, ValueError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Undefined from None
    if not isinstance(point.context, EXACT) and not point.context.isfinite(number):
        raise Undefined
    return number


def fraction(node: Node, p: Point) -> Fraction:
    """The exact value of a node that is a fraction at every point. Raises Inexact for another."""
    return node.at(replace(p, context=FRACTIONS))


def check_size(v: Any, p: Point, limit: float = MAX_ARGUMENT) -> Any:
    """`v` itself. Raises Unreadable if it is above the limit."""
    if not p.context.isfinite(v):
        raise Undefined
    if abs(v) > limit:
        raise Unreadable("too large a number")
    return v


def _is_negative(v: Any, p: Point) -> bool:
    return p.kind != "complex" and v.imag == 0 and v.real < 0


def _number(node: Node, p: Point) -> Any:
    p.reach[0] += len(node.text)
    return p.context.mpf(node.text)


def _symbol(node: Node, p: Point) -> Any:
    """A variable, or one of the constants `\\pi`, `e`, `i`."""
    match node.text:
        case "\\pi":
            return +p.context.pi
        case "e":
            return p.context.e
        case "i":
            return p.context.mpc(0, 1)
    return p.symbol(node.text)


_ARITHMETIC = {"+": operator.add, "mixed": operator.add, "-": operator.sub}
_ARITHMETIC |= {"*": operator.mul, "/": operator.truediv}


def _arithmetic(node: Node, p: Point) -> Any:
    a, b = node.parts
    return _ARITHMETIC[node.operation](a.at(p), b.at(p))


def _negative(node: Node, p: Point) -> Any:
    return p.context.mpf("0") - node.parts[0].at(p)


def _degrees(node: Node, p: Point) -> Any:
    """An angle in degrees, as radians."""
    return node.parts[0].at(p) * p.context.pi / 180


def _application(node: Node, p: Point) -> Any:
    """A function that is not known: each name has a cosine of its own, so that f(x) is not f(y), nor f times
    x."""
    total = p.symbol(node.text)
    for i, argument in enumerate(node.parts):
        total += p.symbol(f"{node.text} {i}") * check_size(argument.at(p), p)
    return p.context.cos(total)


def _power(node: Node, p: Point) -> Any:
    """`base^exponent`; undefined for a negative base and a broken exponent at a real point."""
    base, exponent = node.parts
    if isinstance(p.context, EXACT):
        return _exact_power(base, exponent, p)
    b = base.at(p)
    e = check_size(exponent.at(p), p)
    if b == 0:
        if e.imag == 0 and e.real > 0:
            return b**e
        raise Undefined
    # A logarithm takes longer than the power, so it is taken where the size may be too large.
    may_be_large = abs(e) * (abs(p.context.mag(b)) + 1) > MAX_POWER_BITS
    if may_be_large and abs(e) * (abs(CONTEXT.ln(b)) + 1) > MAX_POWER_BITS:
        raise Unreadable("a tower of powers")
    if _is_negative(b, p) and (e.imag != 0 or e.real != p.context.floor(e.real)):
        raise Undefined
    return p.met(b**e)


def _exact_power(base: Node, exponent: Node, p: Point) -> Any:
    """A power in exact arithmetic, where the exponent is a whole number."""
    try:
        n = exact.whole(fraction(exponent, p))
    except exact.TooManyBits:
        # A tower: its exponent is known by what exponents count by.
        ring = p.context.exponents()
        return p.context.tower(base.at(p), exponent.at(replace(p, context=ring)))
    b = base.at(p)
    zero = b == 0 if isinstance(b, Fraction) else b.number == 0
    if zero and n <= 0:
        raise Undefined
    return p.context.power(b, n)


def _root(node: Node, p: Point) -> Any:
    """The real root of odd degree, else the principal one."""
    radicand, degree = node.parts
    _refuse_exact(p)
    v = radicand.at(p)
    n = check_size(degree.at(p), p)
    if v.imag == 0 and v.real < 0 and n.imag == 0 and n.real % 2 == 1:  # the real root, as on paper
        return -((-v) ** (1 / n))
    if _is_negative(v, p):
        raise Undefined
    return p.context.sqrt(v) if n == 2 else v ** (1 / n) if v else v


def _log(node: Node, p: Point) -> Any:
    r"""Logarithm to a base, or as the point reads a bare `\log`."""
    _refuse_exact(p)
    v = node.parts[0].at(p)
    if _is_negative(v, p):
        raise Undefined
    written = node.parts[1:]
    base = written[0].at(p) if written else {"ln": 0, "lg": 10}.get(node.operation, p.log_base)
    natural = p.context.ln(v)
    return natural / p.context.ln(base) if written or base else natural


def _function(node: Node, p: Point) -> Any:
    """One of mpmath's functions of one number."""
    _refuse_exact(p)
    name = node.operation
    limit = MAX_POWER_BITS if name.endswith(("exp", "h")) else MAX_ARGUMENT
    x = check_size(node.parts[0].at(p), p, limit)
    result = getattr(p.context, name)(x)
    partly_real = name in ("asin", "acos", "acosh", "atanh", "asec", "acsc")
    if p.kind != "complex" and partly_real and result.imag != 0:
        raise Undefined
    if limit == MAX_POWER_BITS:  # \tanh 1000 is 1 less 10^-868
        p.reach[0] += 0.87 * float(abs(x))
    return result


def _refuse_exact(p: Point) -> None:
    if isinstance(p.context, EXACT):
        raise Inexact


_WHOLE = {"absolute": abs, "floor": math.floor, "ceil": math.ceil}


def _whole_or_size(node: Node, p: Point) -> Any:
    """`|x|` and the whole numbers below and above; in exact arithmetic of fractions only."""
    (argument,) = node.parts
    if isinstance(p.context, EXACT):
        return p.context.mpf(_WHOLE[node.operation](fraction(argument, p)))
    v = argument.at(p)
    return abs(v) if node.operation == "absolute" else getattr(p.context, node.operation)(v)


def _series(node: Node, p: Point) -> Any:
    """A sum or product over whole numbers."""
    first, last, term = node.parts
    try:
        start = exact.whole(fraction(first, p))
        end = exact.whole(fraction(last, p))
    except Inexact:
        raise Unreadable("no number of terms") from None
    p.terms[0] += max(end - start + 1, 0)
    if p.terms[0] > MAX_TERMS:
        raise Unreadable("too many terms")
    product = node.operation == "prod"
    total = p.context.mpf(int(product))
    before = most = p.reach[0]
    for k in range(start, end + 1):
        v = term.at(replace(p, bound={**p.bound, node.text: k}))
        total = total * v if product else total + v
        if isinstance(total, Fraction):
            exact.bounded(total)
        if not product:  # its size is that of its largest term
            most = max(most, p.reach[0])
            p.reach[0] = before
    p.reach[0] = max(most, p.reach[0])
    return total


def _combinations(node: Node, p: Point) -> Any:
    """A factorial, or `n` over `k`."""
    name = node.operation
    if isinstance(p.context, EXACT):
        counted = [_counted(part, p) for part in node.parts]
        return p.context.factorial(*counted) if name == "factorial" else p.context.mpf(math.comb(*counted))
    return p.met(getattr(p.context, name)(*(_countable(part, p) for part in node.parts)))


def _counted(node: Node, p: Point) -> int:
    """A number of things. Raises Inexact for what is none, Unreadable for one that is too large."""
    n = exact.whole(fraction(node, p))
    if n > MAX_FACTORIAL:
        raise Unreadable("too large a number")
    if n < 0:
        raise Inexact
    return n


def _countable(node: Node, p: Point) -> Any:
    """What a factorial is taken of. Between whole numbers it is the gamma function, slow in many digits."""
    n = check_size(node.at(p), p, MAX_FACTORIAL)
    if p.context.dps > 2 * DIGITS and not p.context.isint(n):
        raise Unreadable("a factorial in many digits")
    return n


_OPERATIONS: dict[str, Callable[[Node, Point], Any]] = {
    "number": _number, "symbol": _symbol, "negative": _negative, "degrees": _degrees,
    "application": _application, "^": _power, "root": _root, "sum": _series, "prod": _series,
    "factorial": _combinations, "binomial": _combinations, "ln": _log, "lg": _log, "log": _log,
}  # fmt: skip
_OPERATIONS |= dict.fromkeys(_ARITHMETIC, _arithmetic) | dict.fromkeys(_WHOLE, _whole_or_size)
