r"""Evaluates plain expressions at one fixed point, to tell unequal ones apart without algebra.

Numbers, single-letter variables, `+ - * / ^`, `\frac`, `\sqrt`, `\cdot`, `\times`, `\pi`, brackets; anything else, and
anything ambiguous (`1/2x`), is left to algebra. Floating point, exponents capped, input capped: time is bounded. Only a
difference proves something: two expressions that differ at a point are not equal; two that agree may still differ.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

MAX_CHARS = 120
MAX_EXPONENT = 64
_TOLERANCE = 1e-6

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(?P<command>\\(?:frac|sqrt|cdot|times|pi)(?![a-zA-Z]))"
    r"|(?P<letter>[a-zA-Z])(?![a-zA-Z]{2})|(?P<sign>[-+*/^(){}\[\]]))",
    re.ASCII,
)


class _Unreadable(Exception):
    """Not a plain expression."""


def differ(gold: str, answer: str) -> bool:
    """Whether two cleaned expressions certainly have different values. False says nothing."""
    g, a = evaluate(gold), evaluate(answer)
    return g is not None and a is not None and abs(g - a) > _TOLERANCE * max(abs(g), abs(a), 1e-300)


@lru_cache(maxsize=8192)
def evaluate(expression: str) -> float | None:
    """Value of an expression with every letter at a fixed number of its own; None if it is not plain."""
    if len(expression) > MAX_CHARS:
        return None
    try:
        reader = _Reader(expression)
        value = reader.sum()
        if reader.next is not None or not math.isfinite(value):
            return None
        return value
    except (_Unreadable, ArithmeticError, ValueError, RecursionError):
        return None


def _letter(letter: str) -> float:
    """Positive, so that roots and powers are real; e is Euler's number and i is no variable."""
    if letter in "iIjE":
        raise _Unreadable
    return math.e if letter == "e" else 1.0 + math.modf(ord(letter) * 0.6180339887498949)[0]


class _Reader:
    """Recursive descent over the tokens: sum -> product -> signed power -> atom."""

    def __init__(self, expression: str):
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(expression):
            match = _TOKEN.match(expression, at)
            if match is None or match.lastgroup is None:
                if expression[at:].isspace():
                    break
                raise _Unreadable
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()
        self.at = 0

    @property
    def next(self) -> str | None:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else None

    def take(self, expected: str | None = None) -> tuple[str, str]:
        if self.at >= len(self.tokens) or (expected is not None and self.next != expected):
            raise _Unreadable
        self.at += 1
        return self.tokens[self.at - 1]

    def sum(self) -> float:
        value = self.product()
        while self.next in ("+", "-"):
            value += self.product() if self.take()[1] == "+" else -self.product()
        return value

    def product(self) -> float:
        value = self.signed()
        divided = False
        while (token := self.next) is not None and token not in "+-)}]":
            if token in ("*", "\\cdot", "\\times"):
                self.take()
                value *= self.signed()
            elif token == "/":
                self.take()
                value /= self.signed()
                divided = True
            else:
                previous = self.tokens[self.at - 1]
                if divided or (self.tokens[self.at][0] == "number") or (previous[0] == "number" and token == "\\frac"):
                    raise _Unreadable  # 1/2x, x2, 3 \frac12: read differently by different people
                value *= self.power()
        return value

    def signed(self) -> float:
        if self.next in ("+", "-"):
            return self.signed() if self.take()[1] == "+" else -self.signed()
        return self.power()

    def power(self) -> float:
        base = self.atom()
        if self.next != "^":
            return base
        self.take()
        exponent = self.group() if self.next == "{" else self.single()
        if abs(exponent) > MAX_EXPONENT or (base < 0 and exponent != int(exponent)) or self.next == "^":
            raise _Unreadable
        return base**exponent

    def single(self) -> float:
        kind, text = self.take()
        if kind == "number" and len(text) == 1:
            return float(text)
        if kind == "letter":
            return _letter(text)
        raise _Unreadable

    def group(self) -> float:
        closing = {"{": "}", "(": ")", "[": "]"}.get(self.take()[1])
        if closing is None:
            raise _Unreadable
        value = self.sum()
        self.take(closing)
        return value

    def atom(self) -> float:
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        match kind, text:
            case "number", _:
                self.take()
                return float(text)
            case "letter", _:
                self.take()
                return _letter(text)
            case "command", "\\pi":
                self.take()
                return math.pi
            case "command", "\\frac":
                self.take()
                return self.group() / self.group()
            case "command", "\\sqrt":
                self.take()
                degree = self.group() if self.next == "[" else 2.0
                value = self.group()
                if value < 0 or degree != int(degree) or not 2 <= degree <= 9:
                    raise _Unreadable
                return value ** (1.0 / degree)
            case "sign", ("(" | "{"):
                return self.group()
        raise _Unreadable
