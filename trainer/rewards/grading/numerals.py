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
CARDINALS = {word: n for n, word in enumerate(_UNDER_TWENTY.split())} | {
    "a hundred": 100,
    "one hundred": 100,
}
for _tens, _ten in enumerate(
    ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2
):
    CARDINALS[_ten] = 10 * _tens
    for _word in _UNDER_TWENTY.split()[1:10]:
        CARDINALS[f"{_ten} {_word}"] = 10 * _tens + CARDINALS[_word]
_PARTS = {"half": 2, "halves": 2, "quarter": 4, "quarters": 4, "hundredth": 100, "hundredths": 100}
for _n, _part in enumerate(["third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"], 3):
    _PARTS |= {_part: _n, _part + "s": _n}
_WORD = re.compile(r"[a-z]+")


@lru_cache(maxsize=4096)
def read_number_words(text: str) -> tuple[str, str] | None:
    """(the number in digits, what follows it) of a text that begins with a number in words; else None."""
    if len(text) > MAX_CHARS:
        return None
    return _chinese(text) if "㐀" <= text[:1] <= "鿿" or text[:1] == "〇" else _english(text)


def _english(text: str) -> tuple[str, str] | None:
    lowered = text.lower().replace("-", " ")
    words = list(_WORD.finditer(lowered))
    minus = bool(words) and words[0][0] in ("minus", "negative")
    words = words[minus:]
    value, used = _quantity([word[0] for word in words])
    if value is None:
        return None
    end = words[used - 1].end()
    between = lowered[:end].replace(" ", "")
    if (
        not between.isalpha() or text[end : end + 1].strip()
    ):  # punctuation or digits among or behind the words
        return None
    return f"{'-' if minus else ''}{value}", text[end:]


def _quantity(words: list[str]) -> tuple[Fraction | None, int]:
    """A number and how many of the words it takes; (None, 0) if they begin with none."""
    two = " ".join(words[:2])
    used = 2 if two in CARDINALS and " " in two else int(bool(words) and words[0] in CARDINALS)
    if (whole := CARDINALS.get(" ".join(words[:used]))) is None:
        article = words[:1] == ["a"]
        part = words[article] if len(words) > article else ""
        single = part in _PARTS and not part.endswith("s") and (article or part == "half")
        return (Fraction(1, _PARTS[part]), article + 1) if single else (None, 0)

    following = words[used] if len(words) > used else ""
    if following in _PARTS:
        compound = whole > 19 and whole % 10 == 0  # twenty fifths
        plural = following.endswith("s")
        bad = compound or plural != (whole != 1)
        return (None, 0) if bad else (Fraction(whole, _PARTS[following]), used + 1)
    if following == "and":
        part, more = _quantity(words[used + 1 :])
        broken = part is not None and part.denominator > 1 and part < 1
        return (whole + part, used + 1 + more) if broken and part else (None, 0)
    return (None, 0) if following == "hundred" else (Fraction(whole), used)


_DIGITS = {c: n for n, c in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_UNITS = {"十": 10, "百": 100, "千": 1000}
_RUN = "[零〇一二两三四五六七八九十百千]+"
_CHINESE = re.compile(rf"(负?)(?:({_RUN})分之)?({_RUN})(.*)", re.DOTALL)


def _chinese(text: str) -> tuple[str, str] | None:
    if text in ("一半", "半"):
        return "1/2", ""
    match = _CHINESE.fullmatch(text)
    top = _numeral(match[3]) if match else None
    bottom = _numeral(match[2]) if match and match[2] else 1
    if match is None or top is None or not bottom:
        return None
    sign = "-" if match[1] else ""
    return (f"{sign}{top}%" if match[2] == "百" else f"{sign}{Fraction(top, bottom)}"), match[4]


def _numeral(text: str) -> int | None:
    """`二十一` -> 21, `二〇二四` -> 2024; None for what is no numeral."""
    if not _UNITS.keys() & set(text):
        return int("".join(str(_DIGITS[c]) for c in text))
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
