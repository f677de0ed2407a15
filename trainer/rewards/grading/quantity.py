r"""Numbers as people and models write them, as exact fractions with their unit.

Integers, decimals, thousands separators, fractions, mixed numbers, percentages, degrees, money, units,
scientific notation. Nothing here evaluates an expression: a string is a number by its form, or it is
none. So nothing can hang.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd
from typing import Literal

from trainer.rewards.grading import numerals
from trainer.rewards.grading.measurement_units import Unit, unit
from trainer.rewards.grading.notation import common_notation, strip_outer

MAX_CHARS = 200
MAX_EXPONENT = 400
"""Powers of ten beyond this are no answer to a question about an image."""


Form = Literal["plain", "fraction", "mixed", "scientific", "recurring"]


@dataclass(frozen=True)
class Quantity:
    value: Fraction
    """Exact value; a percentage is not divided by 100."""
    decimals: int = -1
    """Digits after the point of a plain decimal; 0 for an integer; -1 for a fraction, mixed number or
    power."""
    percent: bool = False
    unit: Unit | None = None
    """None if none was written, or only the word `units`."""
    glued: bool = False
    """The unit is one letter right after the digits, so it may be a variable: `5h`."""
    form: Form = "plain"
    """How the number is written."""
    written: str = ""
    """The number as it stands, without spaces, sign, unit and separators of thousands."""
    scale: int = 1
    """A million for `5 million`."""

    @property
    def divides(self) -> bool:
        """Whether it is a quotient that comes out even: `168/2`."""
        return self.form == "fraction" and self.value.denominator == 1


_D = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?"
    r"|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?:\.[0-9]+)?(?![0-9,])|[0-9]{1,3}(?:\.[0-9]{3}){2,}(?![0-9.])"
    r"|[0-9]{1,3}(?:'[0-9]{3})+(?:\.[0-9]+)?(?![0-9'])"
    r"|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
)
"""Digits, with or without separators of thousands and a decimal point."""
_SIGN = r"(?:negative |minus |[-+])?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})\s*(?P<money>[＄€£¥₹])?\s*(?P<sign2>[-+]?)\s*(?:"
    rf"(?P<rn>[0-9]*)\.(?P<rh>[0-9]*?)"
    rf"(?:\\(?:overline|bar|dot|overset{{\.}})\s*\{{?\s*(?P<rp>[0-9]+)\s*\}}?|\((?P<rp2>[0-9]+)\)"
    rf"|(?:(?P<rp3>[0-9])(?P=rp3){{2,}}|(?P<rp4>[0-9]{{2,6}}?)(?P=rp4)+)\s*(?:\.\.\.|\\l?dots))"
    rf"|(?P<mixed>[0-9]+)\s*\\frac\s*\{{\s*(?P<mn>[0-9]+)\s*\}}\s*\{{\s*(?P<md>[0-9]+)\s*\}}"
    rf"|\\frac\s*\{{\s*(?P<fsign>-?)\s*(?P<fn>{_D})\s*\}}\s*\{{\s*(?P<fdsign>-?)\s*(?P<fd>{_D})\s*\}}"
    rf"|(?P<sn>{_D})\s*/\s*(?P<sdsign>-?)\s*(?P<sd>{_D})"
    rf"|(?P<em>{_D})[eE](?P<ee>[-+]?[0-9]{{1,4}})(?![0-9.])"
    rf"|(?:(?P<tm>{_D})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*\^\s*"
    rf"(?:[{{(]\s*(?P<te1>[-+]?[0-9]{{1,4}})\s*[)}}]|(?P<te2>-?[0-9]{{1,4}})(?![0-9.]))"
    rf"|(?P<plain>{_D})"
    rf")(?P<rest>.*)",
    re.ASCII,
)
_APPROXIMATELY = re.compile(r"^(?:\\approx|\\sim|about |approximately )\s*", re.ASCII)


@lru_cache(maxsize=8192)
def parse(content: str, context: str = "") -> Quantity | None:
    """Reads the content of a box or a reference answer as one number; None if it is anything else.

    Args:
        content: the content, as it was written.
        context: question and reference answer, whose nouns count as units.
    """
    if len(content) > MAX_CHARS:
        return None
    s = strip_outer(_APPROXIMATELY.sub("", strip_outer(common_notation(content)), count=1))
    return _single(s, context) or _compound(s, context) or _in_words(s, context)


def _single(s: str, context: str) -> Quantity | None:
    match = _NUMBER.fullmatch(s)
    if match is None or (match["sign2"] and match["sign"] and not match["money"]):
        return None
    value, decimals, form = _value(match.groupdict())
    if value is None or (form == "plain" and _DECADE.fullmatch(match["plain"] + match["rest"])):
        return None
    if (match["sign"] in ("-", "negative ", "minus ")) != (match["sign2"] == "-"):
        value = -value
    rest = match["rest"].strip()
    written = _NOT_WRITTEN.sub("", s[: match.start("rest")])
    scale = 1
    scaled = _SCALED.match(rest) if form == "plain" else None
    if scaled is not None and (match["money"] or scaled[1].endswith("illion")):
        scale = _SCALES[scaled[1].lower()[:2]]
        value *= scale
        rest = rest[scaled.end() :].strip()
    if rest.lower() in ("%", "percent", "percentage", "per cent", "pct"):
        return Quantity(value, decimals, percent=True, form=form, written=written)

    measured_in = unit(rest, context) if rest not in ("", ".") else _NO_UNIT
    money = unit(match["money"]) if match["money"] else measured_in
    if money is None or measured_in not in (_NO_UNIT, money):
        return None
    glued = len(match["rest"]) == 1 and rest.isascii() and rest.isalpha()
    return Quantity(value, decimals, False, money if money.dimensions else None, glued, form, written, scale)


_NO_UNIT = Unit(Fraction(1), ())


def _in_words(s: str, context: str) -> Quantity | None:
    """`two thirds`, `seven apples`: a number in words, and perhaps its unit."""
    number = numerals.read_number_words(s)
    return _single("".join(number), context) if number else None


_COMPOUND = re.compile(r"([0-9]+)\s*([A-Za-z°'\"㐀-鿿]+\.?)[\s,]*(?:and\s+)?(?=[0-9]|$)", re.ASCII)


def _compound(s: str, context: str) -> Quantity | None:
    """`1 h 30 min`, `5 ft 3 in`: descending units of one dimension."""
    pieces = _COMPOUND.findall(s) if 2 <= len(s) <= 60 and s[0].isdigit() else []
    if not 2 <= len(pieces) <= 4 or _COMPOUND.sub("", s).strip():
        return None
    total = Fraction(0)
    above: Unit | None = None
    for count, name in pieces:
        part = unit(name, context)
        if part is None or (above and (part.dimensions != above.dimensions or part.size >= above.size)):
            return None
        total += int(count) * part.size
        above = part
    return Quantity(total / above.size, unit=above) if above else None


_DECADE = re.compile(r"[0-9]{1,3}0'?s")
_NOT_WRITTEN = re.compile(r"[\s,＄€£¥₹+]|\\(?:times|cdot)|\*|\b(?:negative|minus)\b")
_SCALED = re.compile(r"(thousand|million|billion|trillion|mn|bn|[KMBkmb])(?![A-Za-z])")
_SCALES = {"th": 10**3, "k": 10**3, "m": 10**6, "mi": 10**6, "mn": 10**6}
_SCALES |= {"b": 10**9, "bi": 10**9, "bn": 10**9, "tr": 10**12}


def _digits(text: str) -> Fraction:
    """The value of digits, with whatever separators of thousands."""
    text = _SEPARATOR.sub("", text)
    if text.count(".") > 1:
        text = text.replace(".", "")
    return Fraction(text.rstrip(".") or "0")


_SEPARATOR = re.compile("[, ']")


def _value(g: dict[str, str | None]) -> tuple[Fraction | None, int, Form]:
    """Value, decimals and form of a number from the groups of `_NUMBER`; no value if it divides by zero or
    is too large."""
    if plain := g["plain"]:
        grouped = plain.count(".") > 1
        return _digits(plain), 0 if grouped else len(plain.partition(".")[2]), "plain"
    if period := g["rp"] or g["rp2"] or g["rp3"] or g["rp4"]:
        # 0.1(23) is (1 * 99 + 23) / 990.
        head = g["rh"] or ""
        nines = 10 ** len(period) - 1
        before = int((g["rn"] or "0") + head)
        return Fraction(before * nines + int(period), nines * 10 ** len(head)), -1, "recurring"
    top = g["mn"] or g["fn"] or g["sn"]
    if top:
        form: Form = "mixed" if g["mixed"] else "fraction"
        divisor = _digits(g["md"] or g["fd"] or g["sd"] or "")
        if not divisor:
            return None, -1, form
        negative = (g["fsign"] == "-") != ("-" in (g["fdsign"], g["sdsign"]))
        part = _digits(top) / divisor
        return _digits(g["mixed"] or "") + (-part if negative else part), -1, form
    exponent = int(g["ee"] or g["te1"] or g["te2"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None, -1, "scientific"
    return _digits(g["em"] or g["tm"] or "1") * Fraction(10) ** exponent, -1, "scientific"


def is_reduced(number: Quantity) -> bool:
    """Whether a fraction of whole numbers is in lowest terms; true of other forms."""
    written = re.findall("[0-9]+", number.written)
    if number.form != "fraction" or len(written) != 2:
        return number.form != "fraction"
    return gcd(*map(int, written)) == 1


def is_normalized(number: Quantity) -> bool:
    """Whether scientific notation has one digit before its point: `4.5e6`, not `45e5`."""
    return re.match(r"-?[1-9](?:\.[0-9]*)?(?![0-9.])", number.written) is not None


def equal(reference: Quantity, answer: Quantity) -> bool:
    """Whether an answer states the number of the reference. Exact; see `_rounds_to` for the one exception.

    A unit or percent sign that only one side wrote does not count against it (25 and 25%, 60 and 60°),
    but two different units do (5 cm and 50 mm agree, 5 cm and 5 m do not), and 25% is also 0.25.
    """
    if reference.percent or answer.percent:
        return _percent_equal(reference, answer)
    scale = Fraction(1)
    if reference.glued and answer.unit is None:
        return False
    if reference.unit and answer.unit:
        if reference.unit.dimensions != answer.unit.dimensions:
            return False
        scale = answer.unit.size / reference.unit.size
    return reference.value == answer.value * scale or (scale == 1 and _rounds_to(reference, answer))


def _percent_equal(reference: Quantity, answer: Quantity) -> bool:
    if reference.unit or answer.unit:
        return False
    exact = reference.value / 100 if reference.percent else reference.value
    if exact == (answer.value / 100 if answer.percent else answer.value):
        return True
    # One side left the sign out. A bare number of at most one may be a share, so only the exact reading
    # counts.
    one_bare = reference.percent != answer.percent and abs(reference.value) > 1
    return one_bare and reference.value == answer.value


def _rounds_to(reference: Quantity, answer: Quantity) -> bool:
    """Whether one is a recurring fraction and the other its decimal: 1/3 and 0.333.

    The decimal must be rounded (not cut) at three digits or more. If the fraction is the reference, any
    correct rounding counts. If the decimal is, its digits must show the fraction's whole period, else
    3.14 would be 22/7.
    """
    decimal, fraction = (reference, answer.value) if answer.decimals < 0 else (answer, reference.value)
    if (reference.decimals < 0) == (answer.decimals < 0):
        return False
    if decimal.decimals < 3 or decimal.decimals > 30 or abs(decimal.value * 10**decimal.decimals) < 100:
        return False
    head, period = _expansion(fraction.denominator, decimal.decimals)
    if period == 0 or (decimal is reference and head + period > decimal.decimals):
        return False
    return abs(decimal.value - fraction) * 2 * 10**decimal.decimals <= 1


def _expansion(denominator: int, limit: int) -> tuple[int, int]:
    """Lengths of the non-recurring and the recurring part of 1/denominator; a period beyond `limit`
    reads limit + 1."""
    head = 0
    while (common := gcd(denominator, 10)) > 1:
        denominator //= common
        head += 1
    if denominator == 1:
        return head, 0
    return head, next((n for n in range(1, limit + 1) if pow(10, n, denominator) == 1), limit + 1)
