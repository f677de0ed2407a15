"""Units that may follow a number: a closed list, their products and quotients, and nouns that the
question itself uses.

A unit is a size and its dimensions (`km/h` is 5/18 of m·s⁻¹), so that any two spellings of one unit
agree: `m/s^2`, `m s^{-2}`, `meters per second squared`. A noun (`5 apples`) is a dimension of its own,
and only one that the question or the reference answer contains. Words of number, scale or denial (`5
lakh`, `5 never`) are units nowhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from trainer.rewards.grading.notation import clean


@dataclass(frozen=True)
class Unit:
    """Some unit of measurement."""

    size: Fraction
    """In base units."""
    dimensions: tuple[tuple[str, int], ...]
    """Sorted (base unit or noun, exponent)."""


_KNOWN: dict[str, Unit] = {}
_CASED: set[str] = {"ml"}
"""Small prefixed symbols, in lower case: `mg` must be written so, for `Mg` is another unit; `KM` can
only be `km`."""


def _define(size: str | int | Fraction, dimensions: str, names: str) -> None:
    powers = sorted((d.rstrip("-0123456789"), int(d.lstrip("-") and d[len(d.rstrip("-0123456789")) :] or 1))
                    for d in dimensions.split())  # fmt: skip
    for name in names.split():
        _KNOWN[name] = Unit(Fraction(size), tuple(powers))


for _size, _dimensions, _names in (
    ("0.0254", "m", "in inch inche"), ("0.3048", "m", "ft foot feet"), ("0.9144", "m", "yd yard"),
    ("1609.344", "m", "mi mile"), (1852, "m", "nmi"), (9460730472580800, "m", "ly lightyear light-year"),
    ("0.45359237", "kg", "lb lbs pound"), ("0.028349523125", "kg", "oz ounce"), (1000, "kg", "t ton tonne 吨"),
    (60, "s", "min minute 分钟"), (3600, "s", "h hr hour 小时"), (86400, "s", "d day 天 日"),
    (604800, "s", "wk week 周"), (1, "month", "month 月"), (12, "month", "yr year 年"), (120, "month", "decade"),
    (1200, "month", "century centurie"),
    ("0.001", "m3", "L l liter litre 升"), ("0.000001", "m3", "mL ml milliliter millilitre cc 毫升"),
    ("0.003785411784", "m3", "gal gallon"), ("4046.8564224", "m2", "acre"), (10000, "m2", "ha hectare 公顷"),
    (1, "dollar", "＄ dollar usd USD buck"), ("0.01", "dollar", "cent ¢"), (1, "euro", "€ euro EUR"),
    (1, "sterling", "£ GBP"), (1, "yen", "¥ yen JPY"), (1, "yuan", "yuan RMB rmb 元"), (1, "rupee", "₹ rupee Rs rs"),
    (1, "degree", "° degree deg 度"), (1, "radian", "rad radian"), (Fraction(1, 60), "degree", "arcmin arcminute"),
    (1, "Celsius", "°C C ℃ celsius Celsius"), (1, "Fahrenheit", "°F F fahrenheit Fahrenheit"), (1, "K", "K kelvin"),
    (1, "revolution s-1", "rps"), (Fraction(1, 60), "revolution s-1", "rpm"), (1, "revolution", "revolution rev turn"),
    (Fraction(10, 36), "m s-1", "kph kmh kmph"), ("0.44704", "m s-1", "mph"), (Fraction(1852, 3600), "m s-1", "knot"),
    ("4.184", "kg m2 s-2", "cal calorie"), (4184, "kg m2 s-2", "kcal Cal kilocalorie"),
    (3600000, "kg m2 s-2", "kWh"), (101325, "kg m-1 s-2", "atm atmosphere"), (100000, "kg m-1 s-2", "bar"),
    ("133.322387415", "kg m-1 s-2", "mmHg torr"), (1, "bit", "bit"), (8, "bit", "byte"), (1, "decibel", "dB decibel"),
    (1, "kg m2 s-2", "Nm"), (1, "kg m s-1", "Ns"), (3600, "kg m2 s-2", "Wh"), (3600, "A s", "Ah"),
    ("3.6", "A s", "mAh"),
    (1, "", "unit sq.unit 个 只 条 本 张 人 辆 棵 支 块 次 岁 件 名 位 種 种"),
):  # fmt: skip
    _define(_size, _dimensions, _names)
_PREFIXES = {
    "": 0, "p pico": -12, "n nano": -9, "µ μ u micro": -6, "m milli": -3, "c centi": -2, "d deci": -1, "k kilo": 3,
    "M mega": 6, "G giga": 9, "T tera": 12,
}  # fmt: skip
for _symbol, _long, _size, _dimensions, _chosen in (
    ("m", "meter metre", 1, "m", "numµckd"), ("g", "gram gramme gm", "0.001", "kg", "nuµmk"),
    ("s", "second sec", 1, "s", "nuµm"), ("A", "ampere amp", 1, "A", "nuµmk"), ("mol", "mole", 1, "mol", "nuµmk"),
    ("N", "newton", 1, "kg m s-2", "nuµmkM"), ("J", "joule", 1, "kg m2 s-2", "nuµmkMG"),
    ("W", "watt", 1, "kg m2 s-3", "nuµmkMG"), ("Pa", "pascal", 1, "kg m-1 s-2", "mkMGh"),
    ("Hz", "hertz", 1, "s-1", "mkMGT"), ("V", "volt", 1, "kg m2 s-3 A-1", "nuµmkM"),
    ("Ω", "ohm Ohm", 1, "kg m2 s-3 A-2", "mkMG"), ("eV", "electronvolt", "1.602176634e-19", "kg m2 s-2", "mkMG"),
    ("T", "tesla", 1, "kg s-2 A-1", "nuµm"), ("H", "henry", 1, "kg m2 s-2 A-2", "nuµm"),
    ("Wb", "weber", 1, "kg m2 s-2 A-1", "m"), ("lm", "lumen", 1, "lm", ""), ("cd", "candela", 1, "cd", ""),
    ("C", "coulomb", 1, "A s", "pnuµm"), ("F", "farad", 1, "kg-1 m-2 s4 A2", "pnuµm"),  # a bare C, F: degrees
):  # fmt: skip
    for _prefix, _exponent in _PREFIXES.items():
        _short, _, _word = _prefix.rpartition(" ")
        _scaled = Fraction(_size) * Fraction(10) ** _exponent
        if not _prefix or any(letter in _chosen for letter in _short.split()):
            _names = [letter + _symbol for letter in _short.split() or [""]]
            _define(_scaled, _dimensions, " ".join(name for name in _names if name not in _KNOWN))
            _CASED.update(name.lower() for name in _names if _short and _short[0] in "pnuµm")
            _define(_scaled, _dimensions, " ".join(_word + name for name in _long.split()))
for _name, _unit in (("厘米", "cm"), ("米", "m"), ("毫米", "mm"), ("分米", "dm"), ("千米", "km"), ("公里", "km"),
                     ("克", "g"), ("千克", "kg"), ("公斤", "kg"), ("秒", "s"), ("时", "h"), ("分", "min")):  # fmt: skip
    _KNOWN[_name] = _KNOWN[_unit]
for _prefix, _power in (("平方", 2), ("立方", 3)):
    for _name in ("厘米", "米", "毫米", "分米", "千米"):
        _KNOWN[_prefix + _name] = Unit(_KNOWN[_name].size ** _power, (("m", _power),))

_CARDINALS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion "
)
_NEVER_TEXT = (
    "first second third fifth eighth ninth twelfth half halve halves quarter dozen score gross lakh lac crore "
    "mega giga tera kilo centi milli micro nano hecto deca deci double triple twice thrice once pair couple "
    "several few many k bn a an the and or not no nor none never neither either both all any some each every only "
    "just than then less more over under above below about around between up down out off to from in on at by of "
    "for with without is are isn was were be been if but so as it its this that these those there here what which "
    "who whose when where why how plus minus times divided multiplied squared cubed square cubic root factorial "
    "mod modulo remainder base power pi sqrt percent percentage point infinity inf log ln sin cos tan sec csc cot "
    "exp max min sum difference product quotient choose negative positive opposite inverse reciprocal wrong "
    "incorrect false true correct right maybe perhaps possibly probably approximately roughly nearly almost "
    "exactly short shy away other otherwise except instead versus vs into am pm alpha beta gamma theta phi repeating "
    "recurring "
    "impossible undefined unknown cannot can can't don't doesn't does did do has have had will would could should "
    "may might must "
)
_NEVER = frozenset(_NEVER_TEXT.split()) | {c + s for c in _CARDINALS.split() for s in ("", "th", "fold")} | {
    c.removesuffix("y") + "ieth" for c in _CARDINALS.split()
}  # fmt: skip
"""Words that change a number, deny it or hedge, whatever the question says; compared in the singular."""
_COUNTED = frozenset(
    ("squares", "points", "roots", "sums", "differences", "products", "quotients", "cubes", "powers")
)
"""Of these, what a question may ask the number of: `12 squares`, `3 points`; only in the plural."""


def singular(word: str) -> str:
    """`apples` -> `apple`, `boxes` -> `boxe` (on both sides alike)."""
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word


@lru_cache(maxsize=4096)
def nouns(text: str) -> frozenset[str]:
    """The words of a question or reference answer that may stand behind a number, lower case and singular."""
    found = frozenset(re.findall(r"[a-z]{2,20}", text[:20_000].lower()))
    words = frozenset(w for w in map(singular, found) if w not in _NEVER and len(w) > 2)
    return words | (found & _COUNTED)


_PIECE = re.compile(
    r"\s*(?:(?P<over>/|(?<![A-Za-z])per(?![A-Za-z]))|(?P<times>[*()]|\\cdot(?![a-zA-Z])|\\times(?![a-zA-Z]))"
    r"|(?P<before>square|sq\.?|cubic|cu\.?)(?=\s)|(?P<after>squared|cubed)(?![A-Za-z])"
    r"|(?P<name>\\Omega(?![a-zA-Z])|\\mu\s*[A-Za-z]+|°\s?[CF](?![A-Za-z])|[A-Za-zΩµμ]+\.?|[°¢＄€£¥₹℃]|[㐀-鿿]+)"
    r"|(?:\^\s*\{?\(?\s*|(?<=[A-Za-z])(?=[23]))(?P<power>-?[0-9])\s*\)?\}?)"
)
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")

_CELSIUS = re.compile(r"(?:degrees?|deg|°)\s*([CF])(?:elsius|ahrenheit)?(?![a-z])", re.IGNORECASE)
_SCALE_OR_UNIT = {
    "K": re.compile(r"(?<![A-Za-z])(?:K|kelvins?)(?![A-Za-z])"),
    "T": re.compile(r"\bT\b|[Tt]esla"),
}
"""A thousand or kelvin, a trillion or tesla: units only where question or reference answer names them."""


@lru_cache(maxsize=8192)
def unit(text: str, context: str = "") -> Unit | None:
    """Reads all of a cleaned text as a unit, or None if it is none.

    Args:
        text: what follows a number: `cm^2`, ` meters per second`, ` red apples`.
        context: question and reference answer, for their nouns.
    """
    text = _CELSIUS.sub(lambda m: "°" + m[1].upper(), text)
    text = (
        _FRACTION.sub(r"\1/(\2)", text.strip(" ~").removeprefix("-").strip())
        .replace("\\Omega", "Ω")
        .replace("每", "/")
    )
    text = re.sub(r"\\mu\s*", "µ", text).replace("mm Hg", "mmHg")
    if text.startswith("(") and text.endswith(")") and text.count("(") == 1:
        text = text[1:-1]
    if not text or len(text) > 60:
        return None
    size, powers = Fraction(1), dict[str, int]()
    last: tuple[Unit, int] | None = None
    sign, inside, next_power, at, ended = 1, False, 1, 0, False
    while at < len(text):
        match = _PIECE.match(text, at)
        if match is None or match.end() == at:
            if text[at:].isspace():
                break
            return None
        at = match.end()
        ended = bool(match["name"] or match["power"] or match["after"] or (inside and match["times"] == ")"))
        if match["over"]:
            if last is None or inside or sign < 0:
                return None
            sign = -1
        elif times := match["times"]:
            inside = times == "(" or (inside and times != ")")
            if times == ")" or (times != "(" and not inside):
                sign = 1
        elif word := match["before"]:
            next_power = 2 if word.startswith("s") else 3
        elif match["after"] or match["power"]:
            if last is None:
                return None
            found, was = last
            power = int(match["power"]) if match["power"] else 2 if match["after"] == "squared" else 3
            if not 0 < abs(power) < 7:
                return None
            size *= found.size ** (was * (power - 1))
            for name, exponent in found.dimensions:
                powers[name] += exponent * was * (power - 1)
            last = None
        else:
            found = _lookup(match["name"], context)
            if found is None:
                return None
            was = sign * next_power
            last, next_power = (found, was), 1
            size *= found.size**was
            for name, exponent in found.dimensions:
                powers[name] = powers.get(name, 0) + exponent * was
    whole = ended and next_power == 1 and text.count("(") == text.count(")")  # `5 *` and `5 (` have no unit
    return Unit(size, tuple(sorted((n, e) for n, e in powers.items() if e))) if whole else None


def _lookup(name: str, context: str) -> Unit | None:
    name = name.replace(" ", "") if name[0] == "°" else name
    word = singular(name.rstrip("."))
    if word in _SCALE_OR_UNIT and not _SCALE_OR_UNIT[word].search(context):
        return None
    any_case = len(word) > 1 and word.lower() not in _CASED
    for form in (name.rstrip("."), word, *((name.lower().rstrip("."), word.lower()) if any_case else ())):
        if form in _KNOWN:
            return _KNOWN[form]
    lowered = name.lower() if name.lower() in _COUNTED else word.lower()
    if lowered in _NEVER or lowered not in nouns(context):
        return None
    return Unit(Fraction(1), ((lowered, 1),))


def split_unit(raw: str, context: str) -> tuple[str, Unit | None]:
    r"""Takes a unit off an expression: `25\pi \text{ cm}^2` -> (`25\pi`, cm²). None where there is none.

    Without `\text` only after a number, bracket or \pi, and only units of two letters and more: in
    `2\pi h` the h is a height, not an hour.
    """
    s = clean(raw)
    marked = _MARKED.search(raw) is not None
    for match in _START.finditer(s, max(0, len(s) - 60)):
        value, rest = s[: match.start()].rstrip(), s[match.start() :].strip()
        if not value or not (marked or (len(rest) > 1 and _NUMERIC_END.search(value))):
            continue
        if (found := unit(rest, context)) is not None:
            return value, found
    return s, None


_MARKED = re.compile(r"\\(?:text|mathrm|mbox|rm|operatorname|textrm)(?![a-z])")
_START = re.compile(r"(?<=[\s})°㐀-鿿])(?:\\Omega|\\mu|[A-Za-z㐀-鿿°µμ])")
_NUMERIC_END = re.compile(r"(?:[0-9})]|\\pi)$")
