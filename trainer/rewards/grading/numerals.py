r"""Numbers in words: `seven`, `twenty-one`, `two thirds`, `one and a half`; `三分之二`, `二十一`.

English words to a hundred and simple fractions; Chinese numerals below ten thousand. Whatever is more
than that, or less clear (`twenty-fifths`, `a dozen`, `one second`), is no number.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

MAX_CHARS = 60

_UNDER_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_SMALL: dict[str, int] = {word: n for n, word in enumerate(_UNDER_TWENTY.split())}
_TENS_TEXT = "twenty thirty forty fifty sixty seventy eighty ninety"
_TENS: dict[str, int] = {word: 10 * n for n, word in enumerate(_TENS_TEXT.split(), 2)}
_PARTS_TEXT = "third fourth fifth sixth seventh eighth ninth tenth"
_PARTS = {"half": 2, "halves": 2, "quarter": 4, "quarters": 4, "hundredth": 100, "hundredths": 100}
for _n, _part in enumerate(_PARTS_TEXT.split(), 3):
    _PARTS[_part] = _n
    _PARTS[_part + "s"] = _n
_WORD = re.compile(r"[a-z]+")


@lru_cache(maxsize=4096)
def read_number_words(text: str) -> tuple[str, str] | None:
    """(the number in digits, what follows it) of a text that begins with a number in words; else None."""
    if len(text) > MAX_CHARS:
        return None
    return _chinese(text) if "㐀" <= text[:1] <= "鿿" or text[:1] == "〇" else _english(text)


def _english(text: str) -> tuple[str, str] | None:
    lowered = text.lower().replace("-", " ")
    words = [(match[0], match.end()) for match in _WORD.finditer(lowered)]
    minus = bool(words) and words[0][0] in ("minus", "negative")
    words = words[minus:]
    value, used = _quantity([word for word, _ in words])
    if value is None:
        return None
    end = words[used - 1][1]
    between = lowered[:end].replace(" ", "")
    if not between.isalpha():  # punctuation or digits among the words
        return None
    rest = text[end:]
    if rest and not rest[0].isspace():
        return None
    return f"{'-' if minus else ''}{value}", rest


def _quantity(words: list[str]) -> tuple[Fraction | None, int]:
    """A number and how many of the words it takes; (None, 0) if they begin with none."""
    whole, used = _cardinal(words)
    if whole is None:
        article = 1 if words[:1] == ["a"] else 0
        part = _PARTS.get(words[article]) if len(words) > article else None
        alone = part == 2 and words[article] == "half"
        if part and (article or alone) and not words[article].endswith("s"):
            return Fraction(1, part), article + 1
        return None, 0

    rest = words[used:]
    if rest[:1] and rest[0] in _PARTS:
        compound = whole > 19 and whole % 10 == 0  # twenty fifths
        plural = rest[0].endswith("s")
        if compound or plural != (whole != 1):
            return None, 0
        return Fraction(whole, _PARTS[rest[0]]), used + 1
    if rest[:1] == ["and"]:
        part, more = _quantity(rest[1:])
        if part is not None and part.denominator > 1 and part < 1:
            return whole + part, used + 1 + more
        return None, 0
    return Fraction(whole), used


def _cardinal(words: list[str]) -> tuple[int | None, int]:
    """A whole number from 0 to 100, and how many of the words it takes."""
    if not words:
        return None, 0
    first = words[0]
    if words[1:2] == ["hundred"]:
        return (100, 2) if first in ("a", "one") else (None, 0)
    if first in _SMALL:
        return _SMALL[first], 1
    if first not in _TENS:
        return None, 0
    unit = _SMALL.get(words[1], 0) if len(words) > 1 else 0
    return (_TENS[first] + unit, 2) if 0 < unit < 10 else (_TENS[first], 1)


_DIGITS = {c: n for n, c in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_UNITS = {"十": 10, "百": 100, "千": 1000}
_RUN = "[零〇一二两三四五六七八九十百千]+"
_CHINESE = re.compile(rf"(负?)(?:({_RUN})分之)?({_RUN})(.*)", re.DOTALL)


def _chinese(text: str) -> tuple[str, str] | None:
    for half in ("一半", "半"):
        if text == half:
            return "1/2", ""
    match = _CHINESE.fullmatch(text)
    if match is None:
        return None
    top = _numeral(match[3])
    bottom = _numeral(match[2]) if match[2] else 1
    if top is None or not bottom:
        return None
    sign = "-" if match[1] else ""
    if match[2] == "百":
        return f"{sign}{top}%", match[4]
    return f"{sign}{Fraction(top, bottom)}", match[4]


def _numeral(text: str) -> int | None:
    """`二十一` -> 21, `二〇二四` -> 2024; None for what is no numeral."""
    if not _UNITS.keys() & set(text):
        digits = "".join(str(_DIGITS[c]) for c in text)
        return int(digits)
    total = 0
    below = 10_000
    digit = None
    for c in text:
        if c in _DIGITS:
            if digit:
                return None
            digit = _DIGITS[c]
            continue
        if _UNITS[c] >= below or digit == 0:
            return None
        below = _UNITS[c]
        total += (1 if digit is None else digit) * below
        digit = None
    return total + (digit or 0)
