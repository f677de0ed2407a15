r"""Option letters in all their spellings, and plain words.

An answer commits to one letter or it earns nothing: `A=B`, `A, B`, `A or B`, `ABCD`, `A. B. C.` name no option.
"""

from __future__ import annotations

import re
from functools import lru_cache

from trainer.rewards.grading.notation import clean

MAX_CHARS = 400

_LEAD = (
    r"(?:(?:so |thus |therefore )?(?:the )?(?:correct |final |best |right )*"
    r"(?:answer|option|choice)s?(?: is| are)?\s*:?\s*){0,3}"
)
_LETTER = re.compile(
    rf"{_LEAD}[\"'{{]*(?P<open>[(\[]?)\s*(?P<letter>[A-Za-z])\s*(?P<close>[)\]]?[.:)]?)[\"'}}]*(?P<rest>\s.*|\(.*\))?",
    re.ASCII | re.IGNORECASE,
)
_OTHER_OPTION = re.compile(
    r"(?<![A-Za-z\\])(?:([A-HJ-Z])(?![A-Za-z])|\(([a-h])\)|([a-h])[.)](?![A-Za-z0-9]))", re.ASCII
)
_DENIAL = re.compile(r"\b(?:not|isn't|wrong|incorrect|false|all of|none of|both|either|neither)\b", re.IGNORECASE)


@lru_cache(maxsize=8192)
def letter(content: str) -> str | None:
    r"""The one option that the content names, upper case: `A.`, `(a)`, `(A) 12`, `\text{Option A}`; else None.

    Text after the letter needs a bracket, full stop or colon between (`A. 12`), and may name no other option.
    """
    if len(content) > MAX_CHARS:
        return None
    s = clean(content).strip("*")
    match = _LETTER.fullmatch(s)
    if match is None:
        return None
    found, rest = match["letter"].upper(), (match["rest"] or "").strip()
    if match["open"] and not match["close"].startswith((")", "]")):
        return None
    if not rest:
        return found
    if not match["close"] and not (rest.startswith("(") and rest.endswith(")")):
        return None
    others = {next(g for g in groups if g).upper() for groups in _OTHER_OPTION.findall(rest)}
    return None if others - {found} or "=" in rest or _DENIAL.search(rest) else found


_EDGES = " \t\"'.,;:!?*`()[]{}"
_ARTICLES = re.compile(r"^(?:the|a|an) (?=.)")


@lru_cache(maxsize=8192)
def words(content: str) -> str:
    r"""Plain text for comparison: case, quotes, edge punctuation, articles and spacing do not matter.

    `\text{Yes}.` -> `yes`; `North-East` -> `northeast`.
    """
    s = clean(content[: 4 * MAX_CHARS]).casefold().strip(_EDGES)
    return re.sub(r"[\s_-]+", "", _ARTICLES.sub("", s))


_MATHS_TEXT = (
    "pi sin cos tan cot sec csc log ln exp sqrt frac lim max min det gcd lcm mod inf infinity oo infty xy yz xz "
    "xyz alpha beta gamma delta theta phi omega lambda mu sigma tau arcsin arccos arctan sinh cosh tanh "
)
_MATHS = frozenset(_MATHS_TEXT.split())
_DATE = re.compile(r"\d{4}[-/]\d{1,2}[-/]\d{1,2}|\d{1,2}[-/]\d{1,2}[-/]\d{4}", re.ASCII)


@lru_cache(maxsize=8192)
def is_text(content: str) -> bool:
    """Whether a gold answer is words (`Yes`, `North America`, `June 5`, a date), not an expression."""
    if "\\text" in content and "\\text{ or" not in content and "\\text{ and" not in content:
        content = clean(content)
    s = content.strip().rstrip(".!?")
    if _DATE.fullmatch(s):
        return True
    tokens = re.findall(r"[^\W\d_]+", s)
    if not tokens or re.search(r"[\\^=<>{}$|+*/;√π×≤≥]", s) or any(t.casefold() in _MATHS for t in tokens):
        return False
    if len(tokens) == 1:
        return len(tokens[0]) >= 2 and (tokens[0] == s.strip("\"'") or len(tokens[0]) >= 4)
    return any(len(t) >= 3 for t in tokens) and "," not in s
