r"""Arithmetic without rounding: fractions as they are, and whole numbers modulo large primes.

Two expressions of +, -, *, /, whole powers, factorials and symbols are equal if they are so modulo three
primes of 64 bits, with every symbol a number that a seed draws. So `2^{1000}` is not `2^{1000}-1`, and
`9^{9^{9^9}}` is itself. pi and e are symbols, too: no whole powers of them make a rational number.

Each prime p starts a chain in which half of p - 1 is a prime again. An exponent counts modulo p - 1 =
2 q, its own exponent modulo q - 1, and so on: a tower as high as the chain is long needs no expansion,
and a factorial in an exponent is not zero, as it would be where p - 1 has small factors only.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any

LARGEST = (12170096399022066719, 17997958577494612799, 15192721579465955039)
"""Three primes, each the last of a Cunningham chain of the first kind, `2 q + 1` after `q`."""
CHAIN = 5
"""Primes in a chain."""
MAX_BITS = 1 << 14
"""Bits of a fraction that is kept as it is: an exponent, or what a factorial is taken of."""


class Inexact(Exception):
    """This arithmetic does not decide: the value is no fraction, or is not known to be a whole number."""


class TooManyBits(Inexact):
    """A fraction of more than MAX_BITS."""


@dataclass(frozen=True)
class Fractions:
    """Numbers as fractions, in the place of mpmath's context: what it lacks is Inexact."""

    def mpf(self, number: Any) -> Fraction:
        return Fraction(number)

    def power(self, base: Fraction, exponent: int) -> Fraction:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) > MAX_BITS and abs(base) != 1:
            raise TooManyBits
        return base**exponent

    def factorial(self, n: int) -> Fraction:
        if n > MAX_BITS >> 4:
            raise TooManyBits
        return Fraction(math.factorial(n))

    def exponents(self) -> Any:
        raise TooManyBits

    def __getattr__(self, name: str) -> Any:
        raise Inexact


@dataclass(frozen=True)
class Residues:
    """Numbers modulo a prime (`level` 0), or modulo what the exponents of the level below count by."""

    largest: int
    level: int = 0

    @property
    def prime(self) -> int:
        """The chain's prime of this level."""
        return self.largest >> self.level

    @property
    def modulus(self) -> int:
        return 2 * self.prime if self.level else self.prime

    def exponents(self) -> Residues:
        """The residues that exponents of these count by."""
        if self.level == CHAIN - 1:
            raise Inexact
        return Residues(self.largest, self.level + 1)

    def mpf(self, number: Any) -> Residue:
        fraction = Fraction(number)
        top = Residue(fraction.numerator, self)
        return top if fraction.denominator == 1 else top / fraction.denominator

    def power(self, base: Residue, exponent: int) -> Residue:
        if exponent < 0:
            return self.mpf(1) / self.power(base, -exponent)
        return Residue(pow(base.number, exponent, self.modulus), self)

    def tower(self, base: Residue, exponent: Residue) -> Residue:
        """`base^exponent` for an exponent that was not expanded, above zero unless the level is 0."""
        if base.number % self.prime == 0:
            raise Inexact
        power = pow(base.number, exponent.number, self.prime)
        if self.level and power % 2 != base.number % 2:
            power += self.prime  # the other number modulo 2 q
        return Residue(power, self)

    def factorial(self, n: int) -> Residue:
        return Residue(_factorial(n, self.modulus), self)

    def symbol(self, name: str, seed: int) -> Residue:
        """The number that a symbol stands for. In an exponent it stands for none."""
        if self.level:
            raise Inexact
        return Residue(random.Random(f"{seed} {name} {self.largest}").getrandbits(80), self)

    @property
    def pi(self) -> Residue:
        return self.symbol("\\pi", 0)

    @property
    def e(self) -> Residue:
        return self.symbol("\\e", 0)

    def __getattr__(self, name: str) -> Any:
        raise Inexact


@lru_cache(maxsize=64)
def _factorial(n: int, modulus: int) -> int:
    return reduce(lambda product, k: product * k % modulus, range(2, n + 1), 1)


class Residue:
    """A number modulo `ring.modulus`."""

    __slots__ = ("number", "ring")

    def __init__(self, number: int, ring: Residues) -> None:
        self.number = number % ring.modulus
        self.ring = ring

    def __add__(self, other: Residue) -> Residue:
        return Residue(self.number + other.number, self.ring)

    def __sub__(self, other: Residue) -> Residue:
        return Residue(self.number - other.number, self.ring)

    def __mul__(self, other: Residue) -> Residue:
        return Residue(self.number * other.number, self.ring)

    def __truediv__(self, other: Residue | int) -> Residue:
        divisor = other if isinstance(other, int) else other.number
        if self.ring.level:  # 2 divides 2 q
            raise Inexact
        if divisor % self.ring.modulus == 0:
            raise ZeroDivisionError
        return Residue(self.number * pow(divisor, -1, self.ring.modulus), self.ring)

    def __pos__(self) -> Residue:
        return self


FRACTIONS = Fractions()
PRIMES = tuple(map(Residues, LARGEST))
"""The residues by which two expressions are compared."""
EXACT = (Fractions, Residues)
"""Types of these arithmetics, beside mpmath's."""


def bounded(number: Fraction) -> None:
    """Raises TooManyBits for a fraction that is not kept."""
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > MAX_BITS:
        raise TooManyBits


def whole(number: Fraction) -> int:
    """A fraction that is a whole number. Raises Inexact for another."""
    if number.denominator != 1:
        raise Inexact
    return number.numerator
