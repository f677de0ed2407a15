r"""Numbers in words: `seven`, `two thirds`, `one and a half`; `三`.

English words to twenty and simple fractions; Chinese numerals to ten. Whatever is more
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
CARDINALS = {word: n for n, word in enumerate(_UNDER_TWENTY.split())} | {"twenty": 20}
_PARTS = {"half": 2, "halves": 2, "quarter": 4, "quarters": 4, "hundredth": 100, "hundredths": 100}
for _n, _part in enumerate(["third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"], 3):
    _PARTS |= {_part: _n, _part + "s": _n}
_CHINESE = {numeral: str(n) for n, numeral in enumerate("零一二三四五六七八九十")} | {"两": "2", "半": "1/2"}
_WORD = re.compile(r"[a-z]+")


@lru_cache(maxsize=4096)
def read_number_words(text: str) -> tuple[str, str] | None:
    """(the number in digits, what follows it) of a text that begins with a number in words; else None."""
    if len(text) > MAX_CHARS:
        return None
    if text[:1] in _CHINESE:
        return _CHINESE[text[0]], text[1:]
    lowered = text.lower().replace("-", " ")
    words = list(_WORD.finditer(lowered))
    minus = bool(words) and words[0][0] in ("minus", "negative")
    words = words[minus:]
    value, used = _quantity([word[0] for word in words])
    if value is None:
        return None
    end = words[used - 1].end()
    between = lowered[:end].replace(" ", "")
    if not between.isalpha() or text[end : end + 1].strip():  # punctuation or digits among or behind them
        return None
    return f"{'-' if minus else ''}{value}", text[end:]


def _quantity(words: list[str]) -> tuple[Fraction | None, int]:
    """A number and how many of the words it takes; (None, 0) if they begin with none."""
    if (whole := CARDINALS.get("".join(words[:1]))) is None:
        article = words[:1] == ["a"]
        part = words[article] if len(words) > article else ""
        single = part in _PARTS and not part.endswith("s") and (article or part == "half")
        return (Fraction(1, _PARTS[part]), article + 1) if single else (None, 0)

    following = words[1] if len(words) > 1 else ""
    if following in _PARTS:
        bad = whole == 20 or following.endswith("s") != (whole != 1)  # twenty fifths
        return (None, 0) if bad else (Fraction(whole, _PARTS[following]), 2)
    if following == "and":
        part, more = _quantity(words[2:])
        broken = part is not None and part.denominator > 1 and part < 1
        return (whole + part, 2 + more) if broken and part else (None, 0)
    return (None, 0) if following == "hundred" else (Fraction(whole), 1)
