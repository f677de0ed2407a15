r"""Splits LaTeX or plain mathematics into the tokens that `reader.py` reads."""

from __future__ import annotations

import re

from trainer.rewards.grading.values import Unreadable

_OWN_NAMES = "sin cos tan cot sec csc sinh cosh tanh coth asin acos atan ln log lg exp"
FUNCTIONS: dict[str, str] = {name: name for name in _OWN_NAMES.split()}
for _name in _OWN_NAMES.split()[:9]:  # to tanh
    FUNCTIONS["arc" + _name] = "a" + _name
FUNCTIONS |= {"tg": "tan", "ctg": "cot", "arctg": "atan"}
"""mpmath's names of functions, by how they are written."""
_PLAIN_WORDS = frozenset([*FUNCTIONS, "sqrt", "pi"])

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9,])|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"|\\[a-zA-Z]+|(?P<word>[a-zA-Z]+)|⟪[^⟫]*⟫|[-+*/^_()\[\]{}|!',°%≔])",
    re.ASCII,
)
_ORDER = r"(?:\^\s*(?:\{\s*([0-9n])\s*\}|([0-9n])))?"
_DERIVATIVE = re.compile(
    rf"\\frac\s*\{{\s*(d|\\partial)\s*{_ORDER}\s*(\\?[a-zA-Z]*'*)\s*\}}\s*"
    rf"\{{\s*\1\s*(\\?[a-zA-Z])\s*{_ORDER}\s*\}}|(?<![A-Za-z\\])(d)([a-zA-Z])\s*/\s*d([a-zA-Z])(?![a-zA-Z])",
    re.ASCII,
)


def _derivative(m: re.Match[str]) -> str:
    order = m[2] or m[3] or "1", m[6] or m[7] or "1"
    parts = (m[8], m[9], m[10], "1", "1") if m[8] else (m[1], m[4].strip(), m[5], *order)
    return "⟪" + " ".join(parts).replace("\\", "") + "⟫"


def tokens(text: str) -> list[str]:
    """Numbers, commands, letters, derivatives and signs. Raises Unreadable."""
    found: list[str] = []
    text = _DERIVATIVE.sub(_derivative, text)
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            raise Unreadable(f"unexpected {text[position:][:10]!r}")
        if match["number"] and match.start("number") == position and found and found[-1].isalpha():
            found.append("_")  # x1
        found += _split_word(match["word"]) if match["word"] else [match[0].strip()]
        position = match.end()
    return found


def _split_word(word: str) -> list[str]:
    """A known name is a command (`sin`, `2xsin`), other letters stand for themselves; a long word is no
    mathematics."""
    for start in range(min(3, len(word))):
        if word[start:] in _PLAIN_WORDS:
            return [*word[:start], "\\" + word[start:]]
    if len(word) > 5:
        raise Unreadable(f"the word {word!r}")
    return list(word)
