r"""Reads plain expressions, and evaluates them at one fixed point, to tell unequal ones apart without algebra.

Numbers, single-letter variables, `+ - * / ^`, `\frac`, `\sqrt`, `\cdot`, `\times`, `\pi`, brackets, `\sin(…)` and its
like; anything else, and anything ambiguous (`1/2x`, `\sin 2x`), is left to algebra. Floating point, exponents capped,
input capped: time is bounded. Only a difference proves something: two expressions that differ at a point are not equal;
two that agree may still differ (`polynomial.py` proves that some are equal).
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

MAX_CHARS = 120
MAX_EXPONENT = 64
_TOLERANCE = 1e-6

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(?P<command>\\(?:frac|sqrt|cdot|times|pi|sin|cos|tan|ln)(?![a-zA-Z]))"
    r"|(?P<letter>[a-zA-Z])(?![a-zA-Z]{2})|(?P<sign>[-+*/^(){}\[\]]))",
    re.ASCII,
)


class Unreadable(Exception):
    """Not a plain expression, or one whose value is not cheap to find."""


V = TypeVar("V")
"""What an expression is read into: anything with the operators `+ - * /`."""


class Field(Protocol[V]):
    """A kind of numbers. Every method may raise Unreadable or ArithmeticError."""

    def number(self, digits: str) -> V:
        """`12`, `1.5`, `.5`."""
        ...

    def letter(self, letter: str) -> V:
        """A variable, or e; not i."""
        ...

    def pi(self) -> V:
        """The number."""
        ...

    def power(self, base: V, exponent: V) -> V:
        """base^exponent."""
        ...

    def root(self, value: V, degree: V | None) -> V:
        """The square root where no degree is given."""
        ...

    def function(self, name: str, value: V) -> V:
        """sin, cos, tan (of radians) or ln."""
        ...


def differ(gold: str, answer: str) -> bool:
    """Whether two cleaned expressions certainly have different values. False says nothing."""
    g, a = evaluate(gold), evaluate(answer)
    return g is not None and a is not None and abs(g - a) > _TOLERANCE * max(abs(g), abs(a), 1e-300)


@lru_cache(maxsize=8192)
def evaluate(expression: str) -> float | None:
    """Value of an expression with every letter at a fixed number of its own; None if it is not plain."""
    value = read(expression, _Floats())
    return value if value is not None and math.isfinite(value) else None


def read(expression: str, field: Field[V]) -> V | None:
    """The value of an expression; None if it is not plain or its value not cheap to find."""
    if len(expression) > MAX_CHARS:
        return None
    try:
        reader = _Reader(expression, field)
        value = reader.sum()
        return value if reader.next is None else None
    except (Unreadable, ArithmeticError, ValueError, RecursionError):
        return None


class _Floats:
    """Floating-point numbers. Letters are positive, so that roots and powers are real."""

    def number(self, digits: str) -> float:
        return float(digits)

    def letter(self, letter: str) -> float:
        return math.e if letter == "e" else 1.0 + math.modf(ord(letter) * 0.6180339887498949)[0]

    def pi(self) -> float:
        return math.pi

    def power(self, base: float, exponent: float) -> float:
        if abs(exponent) > MAX_EXPONENT or (base < 0 and exponent != int(exponent)):
            raise Unreadable
        return base**exponent

    def root(self, value: float, degree: float | None) -> float:
        degree = 2.0 if degree is None else degree
        if value < 0 or degree != int(degree) or not 2 <= degree <= 9:
            raise Unreadable
        return value ** (1.0 / degree)

    def function(self, name: str, value: float) -> float:
        match name:
            case "sin":
                return math.sin(value)
            case "cos":
                return math.cos(value)
            case "tan":
                return math.tan(value)
        return math.log(value)


class _Reader(Generic[V]):
    """Recursive descent over the tokens: sum -> product -> signed power -> atom."""

    def __init__(self, expression: str, field: Field[V]):
        self.field = field
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(expression):
            match = _TOKEN.match(expression, at)
            if match is None or match.lastgroup is None:
                if expression[at:].isspace():
                    break
                raise Unreadable
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()
        self.at = 0

    @property
    def next(self) -> str | None:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else None

    def take(self, expected: str | None = None) -> tuple[str, str]:
        if self.at >= len(self.tokens) or (expected is not None and self.next != expected):
            raise Unreadable
        self.at += 1
        return self.tokens[self.at - 1]

    def sum(self) -> V:
        value: Any = self.product()
        while self.next in ("+", "-"):
            value = value + self.product() if self.take()[1] == "+" else value - self.product()
        return value

    def product(self) -> V:
        value: Any = self.signed()
        divided = False
        while (token := self.next) is not None and token not in "+-)}]":
            if token in ("*", "\\cdot", "\\times"):
                self.take()
                value = value * self.signed()
            elif token == "/":
                self.take()
                value = value / self.signed()
                divided = True
            else:
                previous = self.tokens[self.at - 1]
                if divided or (self.tokens[self.at][0] == "number") or (previous[0] == "number" and token == "\\frac"):
                    raise Unreadable  # 1/2x, x2, 3 \frac12: read differently by different people
                value = value * self.power()
        return value

    def signed(self) -> V:
        if self.next in ("+", "-"):
            negative = self.take()[1] == "-"
            value: Any = self.signed()
            return -value if negative else value
        return self.power()

    def power(self) -> V:
        base = self.atom()
        if self.next != "^":
            return base
        self.take()
        exponent = self.group() if self.next == "{" else self.single()
        if self.next == "^":
            raise Unreadable
        return self.field.power(base, exponent)

    def single(self) -> V:
        kind, text = self.take()
        if kind == "number" and len(text) == 1:
            return self.field.number(text)
        if kind == "letter":
            return self.letter(text)
        raise Unreadable

    def letter(self, letter: str) -> V:
        if letter in "iIjE":
            raise Unreadable
        return self.field.letter(letter)

    def group(self) -> V:
        closing = {"{": "}", "(": ")", "[": "]"}.get(self.take()[1])
        if closing is None:
            raise Unreadable
        value = self.sum()
        self.take(closing)
        return value

    def atom(self) -> V:
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        match kind, text:
            case "number", _:
                self.take()
                return self.field.number(text)
            case "letter", _:
                self.take()
                return self.letter(text)
            case "command", "\\pi":
                self.take()
                return self.field.pi()
            case "command", "\\frac":
                self.take()
                over: Any = self.group()
                return over / self.group()
            case "command", "\\sqrt":
                self.take()
                degree = self.group() if self.next == "[" else None
                return self.field.root(self.group(), degree)
            case "command", ("\\sin" | "\\cos" | "\\tan" | "\\ln"):
                self.take()
                return self.field.function(text[1:], self.group())
            case "sign", ("(" | "{"):
                return self.group()
        raise Unreadable
