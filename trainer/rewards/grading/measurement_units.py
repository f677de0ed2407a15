"""Units that may follow a number: a closed list, their products and quotients, and nouns that the
question itself uses.

A unit is a size and its dimensions (`km/h` is 5/18 of m·s⁻¹), so that any two spellings of one unit
agree: `m/s^2`, `m s^{-2}`, `meters per second squared`. A noun (`5 apples`) is a dimension of its own,
if the question or the reference answer contains it. Words of number, scale or denial (`5 lakh`, `5
never`) are never units.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from operator import itemgetter

from trainer.rewards.grading.notation import common_notation
from trainer.rewards.grading.numerals import CARDINALS


@dataclass(frozen=True)
class Unit:
    """A unit of measurement."""

    size: Fraction
    """Size in base units."""
    dimensions: tuple[tuple[str, int], ...]
    """(base unit or noun, exponent), sorted."""


_UNITS = {
    "m": "0.0254 in inch inche, 0.3048 ft foot feet, 0.9144 yd yard, 1609.344 mi mile, 1852 nmi,"
         "9460730472580800 ly lightyear light-year",
    "kg": "0.45359237 lb lbs pound, 0.028349523125 oz ounce, 1000 t ton tonne 吨",
    "s": "60 min minute 分钟, 3600 h hr hour 小时, 86400 d day 天 日, 604800 wk week 周",
    "month": "1 month 月, 12 yr year 年, 120 decade, 1200 century centurie",
    "m2": "4046.8564224 acre, 10000 ha hectare 公顷",
    "m3": "0.001 L l liter litre 升, 0.000001 mL ml milliliter millilitre cc 毫升, 0.003785411784 gal gallon",
    "dollar": "1 ＄ dollar usd USD buck, 0.01 cent ¢", "euro": "1 € euro EUR", "sterling": "1 £ GBP",
    "yen": "1 ¥ yen JPY", "yuan": "1 yuan RMB rmb 元", "rupee": "1 ₹ rupee Rs rs",
    "degree": "1 ° degree deg 度, 1/60 arcmin arcminute", "radian": "1 rad radian",
    "Celsius": "1 °C C ℃ celsius Celsius", "Fahrenheit": "1 °F F fahrenheit Fahrenheit", "K": "1 K kelvin",
    "revolution": "1 revolution rev turn", "revolution s-1": "1 rps, 1/60 rpm",
    "m s-1": "5/18 kph kmh kmph, 0.44704 mph, 1852/3600 knot", "kg m s-1": "1 Ns",
    "kg m2 s-2": "4.184 cal calorie, 4184 kcal Cal kilocalorie, 3600000 kWh, 3600 Wh, 1 Nm",
    "kg m-1 s-2": "101325 atm atmosphere, 100000 bar, 133.322387415 mmHg torr",
    "A s": "3600 Ah, 3.6 mAh", "bit": "1 bit, 8 byte", "decibel": "1 dB decibel",
    "": "1 unit sq.unit 个 只 条 本 张 人 辆 棵 支 块 次 岁 件 名 位 種 种",
}  # fmt: skip
"""Dimensions -> sizes and names of units that take no prefix."""
_PREFIXES = {
    "p": ("pico", -12), "n": ("nano", -9), "µμu": ("micro", -6), "m": ("milli", -3), "c": ("centi", -2),
    "d": ("deci", -1), "k": ("kilo", 3), "M": ("mega", 6), "G": ("giga", 9), "T": ("tera", 12),
}  # fmt: skip
"""Letters -> word, power of ten."""
_PREFIXED = (
    ("m", "meter metre", 1, "m", "nµmckd"), ("g", "gram gramme gm", "0.001", "kg", "nµmk"),
    ("s", "second sec", 1, "s", "nµm"), ("A", "ampere amp", 1, "A", "nµmk"),
    ("mol", "mole", 1, "mol", "nµmk"), ("cd", "candela", 1, "cd", ""), ("lm", "lumen", 1, "lm", ""),
    ("N", "newton", 1, "kg m s-2", "nµmkM"), ("J", "joule", 1, "kg m2 s-2", "nµmkMG"),
    ("W", "watt", 1, "kg m2 s-3", "nµmkMG"), ("Pa", "pascal", 1, "kg m-1 s-2", "mkMG"),
    ("Hz", "hertz", 1, "s-1", "mkMGT"), ("V", "volt", 1, "kg m2 s-3 A-1", "nµmkM"),
    ("Ω", "ohm Ohm", 1, "kg m2 s-3 A-2", "mkMG"),
    ("eV", "electronvolt", "1.602176634e-19", "kg m2 s-2", "mkMG"),
    ("T", "tesla", 1, "kg s-2 A-1", "nµm"), ("H", "henry", 1, "kg m2 s-2 A-2", "nµm"),
    ("Wb", "weber", 1, "kg m2 s-2 A-1", "m"),
    ("C", "coulomb", 1, "A s", "pnµm"), ("F", "farad", 1, "kg-1 m-2 s4 A2", "pnµm"),  # a bare C, F: degrees
)  # fmt: skip
"""(symbol, words, size, dimensions, prefixes that its symbol and words take)."""
_CHINESE = "厘米 cm 米 m 毫米 mm 分米 dm 千米 km 公里 km 克 g 千克 kg 公斤 kg 秒 s 时 h 分 min"


def _measure(size: str | int, dimensions: str, exponent: int = 0) -> Unit:
    """A unit of so many base units, times a power of ten. `dimensions` is written as `kg m2 s-2`."""
    powers = []
    for dimension in dimensions.split():
        base = dimension.rstrip("-0123456789")
        powers.append((base, int(dimension.removeprefix(base) or 1)))
    return Unit(Fraction(size) * Fraction(10) ** exponent, tuple(sorted(powers)))


def known_units() -> tuple[dict[str, Unit], frozenset[str]]:
    """Every unit by each of its names, with prefixes, and the lower case of symbols whose case matters: `mg`
    is not `Mg`, but `KM` can only be `km`."""
    known = {}
    cased = {"ml"}
    for dimensions, row in _UNITS.items():
        for size, *names in map(str.split, row.split(",")):
            known |= dict.fromkeys(names, _measure(size, dimensions))
    for symbol, words, size, dimensions, prefixes in _PREFIXED:
        known.setdefault(symbol, _measure(size, dimensions))
        known |= dict.fromkeys(words.split(), _measure(size, dimensions))
        for letters, (prefix, exponent) in _PREFIXES.items():
            if letters[0] not in prefixes:
                continue
            scaled = _measure(size, dimensions, exponent)
            symbols = [letter + symbol for letter in letters]
            known = dict.fromkeys(symbols, scaled) | known
            known |= {prefix + word: scaled for word in words.split()}
            if exponent < -2:
                cased |= set(map(str.lower, symbols))

    names = _CHINESE.split()
    known |= {name: known[symbol] for name, symbol in zip(names[::2], names[1::2], strict=True)}
    return known, frozenset(cased)


_KNOWN, _CASED = known_units()

_NEVER_TEXT = (
    "first second third fifth eighth ninth twelfth half halve halves quarter dozen score gross lakh "
    "lac crore mega giga tera kilo centi milli micro nano hecto deca deci double triple twice thrice "
    "once pair couple several few many k bn a an the and or not no nor none never neither either both "
    "all any some each every only just than then less more over under above below about around "
    "between up down out off to from in on at by of for with without is are isn was were be been if "
    "but so as it its this that these those there here what which who whose when where why how plus "
    "minus times divided multiplied squared cubed square cubic root factorial mod modulo remainder "
    "base power pi sqrt percent percentage point infinity inf log ln sin cos tan sec csc cot exp max "
    "min sum difference product quotient choose negative positive opposite inverse reciprocal wrong "
    "incorrect false true correct right maybe perhaps possibly probably approximately roughly nearly "
    "almost exactly short shy away other otherwise except instead versus vs into am pm alpha beta "
    "gamma theta phi repeating recurring impossible undefined unknown cannot can can't don't doesn't "
    "does did do has have had will would could should may might must"
)
_LARGE = "thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion"
_CARDINALS = (*CARDINALS, *_LARGE.split())
_CARDINAL_FORMS = {c + end for c in _CARDINALS for end in ("", "th", "fold")}
_CARDINAL_FORMS |= {c.removesuffix("y") + "ieth" for c in _CARDINALS}
_NEVER = frozenset(_NEVER_TEXT.split()) | _CARDINAL_FORMS
"""Words that change a number, deny it or hedge; they are units in no question. They are compared in the
singular."""
_COUNTED = frozenset(
    {"squares", "points", "roots", "sums", "differences", "products", "quotients", "cubes", "powers"}
)
"""Plurals of such words whose number a question may ask for: `12 squares`, `3 points`."""


def singular(word: str) -> str:
    """`apples` -> `apple`. `boxes` -> `boxe` does no harm, as both sides are treated alike."""
    plural = len(word) > 2 and word.endswith("s") and not word.endswith("ss")
    return word[:-1] if plural else word


@lru_cache(maxsize=4096)
def nouns(text: str) -> frozenset[str]:
    """The words of a question or reference answer that may stand behind a number, lower case and singular."""
    words = set(re.findall(r"[a-z]{2,20}", text[:20_000].lower()))
    counted = (word for word in map(singular, words) if word not in _NEVER and len(word) > 2)
    return frozenset(counted) | (words & _COUNTED)


_PIECE = re.compile(
    r"\s*(?:(?P<over>/|(?<![A-Za-z])per(?![A-Za-z]))|(?P<times>[*()]|\\cdot(?![a-zA-Z])|\\times(?![a-zA-Z]))"
    r"|(?:(?P<before>square|sq\.?|cubic|cu\.?)\s+)?"
    r"(?P<name>\\Omega(?![a-zA-Z])|\\mu\s*[A-Za-z]+|°\s?[CF](?![A-Za-z])|[A-Za-zΩµμ]+\.?|[°¢＄€£¥₹℃]|[㐀-鿿]+)"
    r"(?:\s*\^\s*\{?\(?\s*(?P<power>-?[1-6])\s*\)?\}?|(?<=[A-Za-z])(?P<digit>[23])"
    r"|\s*(?P<after>squared|cubed)(?![A-Za-z]))?)\s*"
)
_POWERS = {"": 1, "s": 2, "c": 3}
"""Powers that words before or behind a name ask for, by how they begin: `square`, `sq.`, `cubed`."""
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")

_CELSIUS = re.compile(r"(?:degrees?|deg|°)\s*([CF])(?:elsius|ahrenheit)?(?![a-z])", re.IGNORECASE)
_SCALE_OR_UNIT = {
    "K": re.compile(r"(?<![A-Za-z])(?:K|kelvins?)(?![A-Za-z])"),
    "T": re.compile(r"\bT\b|[Tt]esla"),
}
"""Letters that are a scale (a thousand, a trillion) unless question or reference answer names the unit."""


@lru_cache(maxsize=8192)
def unit(text: str, context: str = "") -> Unit | None:
    """Reads all of a cleaned text as a unit; None if it is not one.

    Args:
        text: what follows a number: `cm^2`, ` meters per second`, ` red apples`.
        context: question and reference answer, for their nouns.
    """
    text = _normalized(text)
    if not text or len(text) > 60 or text.count("(") != text.count(")"):
        return None
    size = Fraction(1)
    powers: Counter[str] = Counter()
    sign = 1  # -1 below a fraction bar
    inside = ended = False  # within brackets, behind what may end a unit
    position = 0
    while position < len(text):
        if (piece := _PIECE.match(text, position)) is None:
            return None
        position = piece.end()
        mark = piece["times"]
        if piece["name"]:
            if (factor := _lookup(piece["name"], context)) is None:
                return None
            word = piece["before"] or piece["after"] or ""
            power = sign * _POWERS[word[:1]] * int(piece["power"] or piece["digit"] or 1)
            size *= factor.size**power
            for name, exponent in factor.dimensions:
                powers[name] += exponent * power
            ended = True
        elif mark:
            ended = inside and mark == ")"
            inside = mark == "(" or (inside and mark != ")")
            sign = 1 if mark == ")" or not inside else sign
        elif not ended or inside or sign < 0:
            return None
        else:
            sign = -1
            ended = False
    return Unit(size, tuple(sorted(filter(itemgetter(1), powers.items())))) if ended else None


def _normalized(text: str) -> str:
    text = _CELSIUS.sub(lambda m: "°" + m[1].upper(), text)
    text = text.strip(" ~").removeprefix("-").removesuffix(" old").removesuffix(" of age").strip()
    text = _FRACTION.sub(r"\1/(\2)", text).replace("\\Omega", "Ω").replace("每", "/")
    text = re.sub(r"\\mu\s*", "µ", text).replace("mm Hg", "mmHg")
    if text.startswith("(") and text.endswith(")") and text.count("(") == 1:
        text = text[1:-1]
    return text


def _lookup(name: str, context: str) -> Unit | None:
    name = name.replace(" ", "") if name[0] == "°" else name
    word = singular(name.rstrip("."))
    if word in _SCALE_OR_UNIT and not _SCALE_OR_UNIT[word].search(context):
        return None
    forms = [name.rstrip("."), word]
    if len(word) > 1 and word.lower() not in _CASED:
        forms += list(map(str.lower, forms))
    if known := next(filter(None, map(_KNOWN.get, forms)), None):
        return known
    lowered = name.lower() if name.lower() in _COUNTED else word.lower()
    if lowered in _NEVER or lowered not in nouns(context):
        return None
    return Unit(Fraction(1), ((lowered, 1),))


def split_unit(raw: str, context: str) -> tuple[str, Unit | None]:
    r"""Separates an expression and its unit: `25\pi \text{ cm}^2` -> (`25\pi`, cm²). None if it has no unit.

    A unit without `\text` must follow a number, a bracket or \pi, and have two letters or more: in
    `2\pi h` the h is a height, not an hour.
    """
    s = common_notation(raw)
    marked = _MARKED.search(raw) is not None
    for match in _START.finditer(s, max(0, len(s) - 60)):
        value = s[: match.start()].rstrip()
        rest = s[match.start() :].strip()
        if not value or not (marked or (len(rest) > 1 and _NUMERIC_END.search(value))):
            continue
        if (known := unit(rest, context)) is not None:
            return value, known
    return s, None


_MARKED = re.compile(r"\\(?:text|mathrm|mbox|rm|operatorname|textrm)(?![a-z])")
_START = re.compile(r"(?<=[\s})°㐀-鿿])(?:\\Omega|\\mu|[A-Za-z㐀-鿿°µμ])")
_NUMERIC_END = re.compile(r"(?:[0-9})]|\\pi)$")


_ANGLE = re.compile(r"([^=<>,:°]{1,200}?)\s*(?:(°|deg(?:rees?)?)|(rad(?:ians?)?))?", re.ASCII)
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}", re.ASCII)


def in_radians(reference: str, answer: str) -> tuple[str, str] | None:
    r"""Both cleaned angles in radians, if one is in degrees and the other in radians; else None.

    `60°` is `\frac{\pi}{3}`: what holds pi and no unit is in radians.
    """
    angles = []
    matches = _ANGLE.fullmatch(reference), _ANGLE.fullmatch(answer)
    for bare, degrees, radians in (match.groups() for match in matches if match):
        if not _WORD.search(bare) and (degrees or radians or "\\pi" in bare):
            angles.append((f"({bare})\\pi/180" if degrees else bare, bool(degrees)))
    one_of_each = len({in_degrees for _, in_degrees in angles}) == 2
    return (angles[0][0], angles[1][0]) if one_of_each else None
