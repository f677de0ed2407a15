"""Units that may follow a number, and the words that may not."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

UNITS: dict[str, tuple[str, Fraction]] = {}
"""Canonical unit -> (dimension, size in the dimension's base unit)."""
_NAMES: dict[str, str] = {}


def _define(dimension: str, unit: str, size: str | int | Fraction, names: str = "") -> None:
    UNITS[unit] = (dimension, Fraction(size))
    for name in (unit, *names.split()):
        _NAMES[name] = unit


for _dimension, _unit, _size, _names in (
    ("length", "mm", "0.001", "millimeter millimetre"),
    ("length", "cm", "0.01", "centimeter centimetre"),
    ("length", "dm", "0.1", "decimeter decimetre"),
    ("length", "m", 1, "meter metre"),
    ("length", "km", 1000, "kilometer kilometre"),
    ("length", "in", "0.0254", "inch inche"),
    ("length", "ft", "0.3048", "foot feet"),
    ("length", "yd", "0.9144", "yard"),
    ("length", "mi", "1609.344", "mile"),
    ("mass", "mg", "0.000001", "milligram"),
    ("mass", "g", "0.001", "gram gm"),
    ("mass", "kg", 1, "kilogram kilo"),
    ("mass", "lb", "0.45359237", "pound"),
    ("mass", "oz", "0.028349523125", "ounce"),
    ("time", "ms", "0.001", "millisecond"),
    ("time", "s", 1, "sec second"),
    ("time", "min", 60, "minute"),
    ("time", "h", 3600, "hr hour"),
    ("time", "day", 86400, ""),
    ("time", "week", 604800, ""),
    ("calendar", "month", 1, ""),
    ("calendar", "yr", 12, "year"),
    ("volume", "mL", "0.001", "ml milliliter millilitre"),
    ("volume", "L", 1, "l liter litre"),
    ("money", "＄", 1, "dollar usd USD buck"),
    ("money", "cent", "0.01", "¢"),
    ("euro", "€", 1, "euro EUR"),
    ("sterling", "£", 1, "GBP"),
    ("yen", "¥", 1, "yen yuan RMB"),
    ("rupee", "₹", 1, "rupee Rs rs"),
    ("angle", "°", 1, "degree deg"),
    ("angle in radians", "rad", 1, "radian"),
    ("temperature C", "°C", 1, "C"),
    ("temperature F", "°F", 1, "F"),
    ("temperature K", "K", 1, "kelvin"),
    ("voltage", "V", 1, "volt"),
    ("current", "A", 1, "amp ampere"),
    ("resistance", "ohm", 1, "Ω Ohm"),
    ("power", "W", 1, "watt"),
    ("power", "kW", 1000, "kilowatt"),
    ("energy", "J", 1, "joule"),
    ("force", "N", 1, "newton"),
    ("pressure", "Pa", 1, "pascal"),
    ("frequency", "Hz", 1, "hertz"),
    ("amount", "mol", 1, "mole"),
    ("speed", "m/s", 1, ""),
    ("speed", "km/h", Fraction(10, 36), "kph kmh kmph"),
    ("speed", "mi/h", "0.44704", "mph"),
):  # fmt: skip
    _define(_dimension, _unit, _size, _names)
for _unit in ("mm", "cm", "dm", "m", "km", "in", "ft", "yd", "mi"):
    for _power, _dimension in ((2, "area"), (3, "cubic length")):
        UNITS[f"{_unit}^{_power}"] = (_dimension, UNITS[_unit][1] ** _power)

_NOT_UNITS_TEXT = (
    "a an and or not no nor to than then less more over under above below about is are isn was be if but by plus "
    "minus times divided half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths "
    "seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths dozen "
    "dozens score gross zero one two three four five six seven eight nine ten eleven twelve hundred hundreds "
    "thousand thousands million millions billion billions trillion trillions k squared cubed square cubic root "
    "factorial mod modulo remainder base pi sqrt percent percentage point pair pairs infinity inf log ln sin cos "
    "tan sec csc cot exp max min sum product choose negative positive wrong incorrect false true maybe either "
    "neither both other otherwise except vs versus into of am pm alpha beta gamma theta phi repeating recurring "
    "approximately roughly nearly almost "
)
_NOT_UNITS = frozenset(_NOT_UNITS_TEXT.split())
"""Words that would change the number, make it a hedge or deny it."""
_WORD = re.compile(r"(?=.*[aeiouy])[A-Za-z]{3,20}", re.ASCII | re.IGNORECASE)
_POWER = re.compile(r"\s*\^\s*(?:\{\s*([23])\s*\}|([23]))$", re.ASCII)


_TRAILING = re.compile(
    r"(?P<value>.*\S)\s*\\(?:text|textrm|textnormal|mathrm|mbox|operatorname)\s*\{(?P<unit>[^{}]*)\}"
    r"(?P<power>\s*\^\s*\{?\s*[23]\s*\}?)?\s*\$?\s*|"
    r"(?P<value2>.*[\w})])\s+(?P<unit2>[A-Za-z]{2,12}\s?[²³]?(?:\s*\^\s*\{?\s*[23]\s*\}?)?)",
    re.ASCII | re.DOTALL,
)


def split_unit(content: str) -> tuple[str, str]:
    r"""Takes a unit off an expression: `25\pi \text{ cm}^2` -> (`25\pi`, `cm^2`). Unit "" where there is none.

    Without `\text` only known units of two letters and more: in `2\pi h` the h is a height, not an hour.
    """
    match = _TRAILING.fullmatch(content) if len(content) <= 400 else None
    if match is None:
        return content, ""
    if match["unit2"]:
        unit = canonical_unit(match["unit2"].replace("²", "^2").replace("³", "^3"))
        return (match["value2"], unit) if unit in UNITS else (content, "")
    unit = canonical_unit(" " + match["unit"].strip(" ~\\,") + (match["power"] or ""))
    return (match["value"], unit) if unit else (content, "")


@lru_cache(maxsize=4096)
def canonical_unit(rest: str) -> str | None:
    """What follows a number, as a canonical unit: "" for nothing (or the bare word unit), None if it is no unit."""
    loose = rest[:1] in " -~("  # only then may it be any noun: `5 apples` is five, `5abc` is a product
    rest = rest.strip(" .")
    if rest.startswith("(") and rest.endswith(")"):
        rest = rest[1:-1].strip()
    rest = rest[1:].strip() if rest[:1] in "-~" and len(rest) > 1 and rest[1].isalpha() else rest
    if not rest:
        return ""
    if len(rest) > 60:
        return None
    if rest.replace(" ", "") in ("°C", "°F"):
        return rest.replace(" ", "")
    if rest[0] == "°" or rest.lower().startswith("degrees "):
        tail = rest[1:].strip() if rest[0] == "°" else rest[8:].strip()
        return {"": "°", "C": "°C", "F": "°F", "Celsius": "°C", "Fahrenheit": "°F", "celsius": "°C"}.get(tail)
    power = 1
    if match := _POWER.search(rest):
        power, rest = int(match[1] or match[2]), rest[: match.start()].strip()
    lowered = rest.lower()
    for prefix, value in (("square ", 2), ("sq. ", 2), ("sq ", 2), ("cubic ", 3), ("cu ", 3)):
        if lowered.startswith(prefix) and power == 1:
            power, rest = value, rest[len(prefix) :].strip()
    for suffix, value in ((" squared", 2), (" cubed", 3)):
        if lowered.endswith(suffix) and power == 1:
            power, rest = value, rest[: -len(suffix)].strip()
    over, slash, under = rest.replace(" per ", "/").partition("/")
    name = _name(over, loose)
    if name is None or (slash and power != 1):
        return None
    if slash:
        below = _name(under, loose)
        return None if not below or not name else f"{name}/{below}"
    return name if power == 1 or not name else f"{name}^{power}"


def _name(words: str, loose: bool) -> str | None:
    words = words.strip()
    if known := _known(words):
        return known
    if words.lower() in ("unit", "units"):
        return ""
    parts = words.split()
    if not loose or not 1 <= len(parts) <= 3 or any(not _WORD.fullmatch(p) or p.lower() in _NOT_UNITS for p in parts):
        return None
    return " ".join(_singular(p.lower()) for p in parts)


def _known(word: str) -> str | None:
    word = word.rstrip(".")
    for form in (word, word.lower()) if len(word) > 1 else (word,):
        for candidate in (form, _singular(form)):
            if candidate in _NAMES:
                return _NAMES[candidate]
    return None


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word
