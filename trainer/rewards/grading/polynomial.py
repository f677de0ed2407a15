r"""Proves plain expressions equal, exactly and in bounded time, as quotients of polynomials with rational coefficients.

Letters, e, pi, roots and sines are the polynomials' indeterminates; the square root of a rational number is a product
of roots of primes, so `\sqrt{8}` is `2\sqrt{2}` and `\frac{1}{\sqrt{2}}` is `\frac{\sqrt{2}}{2}`. Two quotients are
equal if cross multiplication gives the same polynomial. Only equality proves something: `\sqrt{x^2}` and `x` are left
to algebra.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from trainer.rewards.grading import arithmetic
from trainer.rewards.grading.arithmetic import Unreadable

MAX_TERMS = 20
MAX_POWER = 12
MAX_BITS = 2_000
"""Of a coefficient's numerator or denominator: powers of powers would fill the memory."""
MAX_RADICAND = 1_000_000
"""Taken apart into primes by trial division: a thousand steps at most."""

Monomial = tuple[tuple[str, int], ...]
"""Sorted (indeterminate, exponent); `2`, `3`, `5`... are the square roots of these primes, with exponent 1."""
Polynomial = dict[Monomial, Fraction]
"""No zero coefficients."""


def same(first: str, second: str) -> bool:
    """Whether two cleaned expressions certainly have the same value. False says nothing."""
    a, b = _quotient(first), _quotient(second)
    try:
        return a is not None and b is not None and _times(a.over, b.under) == _times(b.over, a.under)
    except Unreadable:
        return False


@lru_cache(maxsize=8192)
def _quotient(expression: str) -> _Quotient | None:
    return arithmetic.read(expression, _Quotients())


class _Quotient:
    """over / under."""

    def __init__(self, over: Polynomial, under: Polynomial):
        if not under:
            raise ZeroDivisionError
        self.over, self.under = over, under

    def __add__(self, other: _Quotient) -> _Quotient:
        return _Quotient(
            _plus(_times(self.over, other.under), _times(other.over, self.under)), _times(self.under, other.under)
        )

    def __sub__(self, other: _Quotient) -> _Quotient:
        return self + -other

    def __neg__(self) -> _Quotient:
        return _Quotient({m: -c for m, c in self.over.items()}, self.under)

    def __mul__(self, other: _Quotient) -> _Quotient:
        return _Quotient(_times(self.over, other.over), _times(self.under, other.under))

    def __truediv__(self, other: _Quotient) -> _Quotient:
        return _Quotient(_times(self.over, other.under), _times(self.under, other.over))

    def constant(self) -> Fraction | None:
        """Its value if it is a rational number."""
        if self.over.keys() <= {()} and self.under.keys() == {()}:
            return self.over.get((), Fraction(0)) / self.under[()]
        return None

    def text(self) -> str:
        """Equal texts, equal values."""
        return "/".join(str(sorted(part.items())) for part in (self.over, self.under))


_ONE: Polynomial = {(): Fraction(1)}


class _Quotients:
    """The field that `arithmetic.read` reads into."""

    def number(self, digits: str) -> _Quotient:
        value = Fraction(digits)
        return _Quotient({(): value} if value else {}, _ONE)

    def letter(self, letter: str) -> _Quotient:
        return _Quotient({((letter, 1),): Fraction(1)}, _ONE)

    def pi(self) -> _Quotient:
        return self.letter("\\pi")

    def power(self, base: _Quotient, exponent: _Quotient) -> _Quotient:
        n = exponent.constant()
        if n is None or n.denominator != 1 or abs(n) > MAX_POWER:
            raise Unreadable
        result = _Quotient(_ONE, _ONE)
        for _ in range(abs(int(n))):
            result = result * base if n > 0 else result / base
        return result

    def root(self, value: _Quotient, degree: _Quotient | None) -> _Quotient:
        """Of a rational number, square roots by primes; any other root is an indeterminate of its own."""
        radicand = value.constant()
        if degree is not None or radicand is None:
            n = 2 if degree is None else degree.constant()
            if n is None:
                raise Unreadable
            return self.letter(f"root {n} of {value.text()}")
        if radicand < 0 or max(radicand.numerator, radicand.denominator) > MAX_RADICAND:
            raise Unreadable
        over, under = _square_root(radicand.numerator), _square_root(radicand.denominator)
        return _Quotient(over, under)

    def function(self, name: str, value: _Quotient) -> _Quotient:
        """An indeterminate of its own for each argument."""
        return self.letter(f"{name} of {value.text()}")


def _square_root(n: int) -> Polynomial:
    whole, odd, prime = 1, [], 2
    while prime * prime <= n:
        exponent = 0
        while n % prime == 0:
            n, exponent = n // prime, exponent + 1
        whole *= prime ** (exponent // 2)
        odd += [prime] * (exponent % 2)
        prime += 1
    odd += [n] * (n > 1)
    return {tuple((str(p), 1) for p in sorted(odd, key=str)): Fraction(whole)} if n else {}


def _plus(a: Polynomial, b: Polynomial) -> Polynomial:
    total = dict(a)
    for monomial, coefficient in b.items():
        total[monomial] = total.get(monomial, Fraction(0)) + coefficient
    return {monomial: coefficient for monomial, coefficient in total.items() if coefficient}


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    if len(a) * len(b) > MAX_TERMS**2:
        raise Unreadable
    product: Polynomial = {}
    for first, c in a.items():
        for second, d in b.items():
            monomial, factor = _merged(first, second)
            product[monomial] = product.get(monomial, Fraction(0)) + c * d * factor
    if len(product) > MAX_TERMS or any(_bits(coefficient) > MAX_BITS for coefficient in product.values()):
        raise Unreadable
    return {monomial: coefficient for monomial, coefficient in product.items() if coefficient}


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _merged(first: Monomial, second: Monomial) -> tuple[Monomial, int]:
    if not first or not second:
        return first or second, 1
    exponents, factor = dict(first), 1
    for name, exponent in second:
        exponents[name] = exponents.get(name, 0) + exponent
        if exponents[name] == 2 and name.isdigit():  # the square of a prime's root
            del exponents[name]
            factor *= int(name)
    return tuple(sorted(exponents.items())), factor
