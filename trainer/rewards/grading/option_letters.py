r"""Option letters in all their spellings, and plain words.

A box commits to one letter or it earns nothing. A marked letter (`(B)`, `B.`, `B:`) at the start of the
box commits, whatever the option's text then says (`(B) x = 5`, `C. Both A and B`). A second marked
letter takes it back, and so does a second bare one (`A = B`, `A or B`, `ABCD`).
"""

from __future__ import annotations

import re
from functools import lru_cache

from trainer.rewards.grading.notation import common_notation

MAX_CHARS = 400

_LEAD = (
    r"(?:(?:so |thus |therefore )?(?:the )?(?:correct |final |best |right )*"
    r"(?:answer|option|choice)s?(?: is| are)?\s*:?\s*){0,3}(?:答案|选项)?(?:是|为|选择?)?:?\s*"
)
_BARE = re.compile(
    rf"{_LEAD}[\"{{]*(?P<letter>[A-Za-z])[\"}}]*"
    rf"(?:项|选项| is (?:correct|right|the (?:correct |right )?answer))?"
    r"(?P<rest>\s*\(.*\))?",
    re.ASCII | re.IGNORECASE,
)
_MARKED = re.compile(
    rf"{_LEAD}[\"{{]*(?:\(\s*(?P<a>[A-Za-z])\s*\)|\[\s*(?P<b>[A-Za-z])\s*\]|(?P<c>[A-Za-z])\s*[.:)])[.:]?[\"}}]*"
    r"(?P<rest>(?![A-Za-z^+*/=_!?'(]).*)",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)
_MARK = re.compile(
    r"(?<![A-Za-z0-9\\}])[(\[]\s*([A-Ja-j])\s*[)\]]|(?<![A-Za-z\\])([A-J])[.:)]\s+\S|(?<![A-Za-z\\(])([a-j])\)\s+\S",
    re.ASCII,
)
_OPTION = re.compile(r"(?<![A-Za-z\\])(?:([A-HJ-Z])(?![A-Za-z])|\(([a-h])\))", re.ASCII)
_TAKEN_BACK = re.compile(
    r"(?:(?:,|/|\||&|=|\+|-|\\[a-zA-Z]+"
    r"|(?:or|and|not|no|maybe|perhaps|possibly|probably|actually|rather|instead|wait|sorry|also|even)(?![a-z]))\s*)*[\"'{(\[]*([A-Za-z])[)\].:\"'}]*"
    r"|is (?:not|wrong|incorrect|false)\b.*",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)


def option_letter(content: str) -> str | None:
    r"""The one option that the content names, upper case: `A.`, `(a)`, `(A) 12`, `\text{Option A}`;
    else None."""
    named = option(content)
    return named[0] if named else None


@lru_cache(maxsize=8192)
def option(content: str) -> tuple[str, str] | None:
    """`option_letter`, and what follows the letter."""
    if len(content) > MAX_CHARS:
        return None
    s = common_notation(content).strip("*")
    if s[:1] == s[-1:] == "'":
        s = s[1:-1]
    bare = _BARE.fullmatch(s)
    if bare:
        named = bare["letter"].upper()
        rest = bare["rest"] or ""
        contradicted = _letters(_OPTION, rest) - {named} or "=" in rest
        return None if contradicted else (named, rest.strip())

    if (marked := _MARKED.fullmatch(s)) is None:
        return None
    named = (marked["a"] or marked["b"] or marked["c"]).upper()
    rest = marked["rest"].strip()
    names_another = _letters(_MARK, rest) - {named}
    if names_another:
        return None
    taken_back = _TAKEN_BACK.fullmatch(rest)
    if taken_back is not None and (taken_back[1] or "").upper() != named:
        return None
    return named, rest


_CHOICE = re.compile(
    r"(?:^|(?<=[\s;,]))\(?([A-J])[.):、．]\s*(\S.*?)(?=[\s;,]+\(?[A-J][.):、．]\s*\S|\s*\n|\s*$)"
)


@lru_cache(maxsize=2048)
def listed(question: str) -> dict[str, str]:
    """The choices that a question lists, by their letters from A on; none for fewer than two."""
    listed: dict[str, str] = {}
    for letter, text in _CHOICE.findall(question[-20_000:]):
        listed = {} if letter == "A" else listed
        if ord(letter) == ord("A") + len(listed):
            listed[letter] = plain_words(text)
    return listed if len(listed) > 1 else {}


def reference_letter(content: str, question: str) -> str | None:
    """The letter that a reference answer is, alone or with the text that the question gives it."""
    if (named := option(content)) is None:
        return None
    letter, rest = named
    return letter if not rest or listed(question).get(letter) == plain_words(rest) else None


def names_letters(content: str, wanted: frozenset[str], question: str) -> bool:
    """Whether an answer names these options, and gives a single one no other's text."""
    named = option(content)
    if len(wanted) > 1 or named is None or named[0] not in wanted:
        return len(wanted) > 1 and letters(content, question) == wanted
    choices = listed(question)
    text = plain_words(named[1])
    return not text or text == choices.get(named[0]) or text not in choices.values()


_LETTERS = re.compile(r"[A-H](?:(?:\s*[,;&/]\s*|\s*and\s*|\s*)[A-H]){1,7}")


def letters(content: str, question: str) -> frozenset[str] | None:
    """The options that `BD` or `B, D` names in a question that lists some; None for anything else."""
    s = common_notation(content)
    if len(s) > 60 or _LETTERS.fullmatch(s) is None:
        return None
    named = re.findall("[A-H]", s)
    known = len(set(named)) == len(named) and listed(question).keys() >= set(named)
    return frozenset(named) if known else None


def _letters(pattern: re.Pattern[str], text: str) -> set[str]:
    """The letters that a pattern of several groups finds, upper case."""
    return {next(filter(None, groups)).upper() for groups in pattern.findall(text)}


_EDGES = " \t\"'.,;:!?*`()[]{}"
_ARTICLES = re.compile(r"^(?:the|a|an) (?=.)")
_TRANSLATED = dict.fromkeys(("是", "是的"), "yes") | dict.fromkeys(("否", "不", "不是"), "no")
_TRANSLATED |= dict.fromkeys(("正确", "对"), "true") | dict.fromkeys(("错误", "错"), "false")
_CASE_MATTERS = re.compile(r"(?=.*[a-z0-9].*[A-Z]|[A-Z]{2,3}$)[A-Za-z0-9]{2,10}", re.ASCII)
_ANSWERS = frozenset(("YES", "NO", "TRUE", "FALSE"))
_CHEMISTRY = re.compile(
    r"\b(?:element|symbol|formula|atom|molecule|compound|ion|gas|metal)s?\b", re.IGNORECASE
)
_LABEL = re.compile(r"[A-Za-z]|[IVX]{1,5}|[ivx]{1,5}|[0-9]{1,2}", re.ASCII)


def same_words(reference: str, answer: str, question: str = "") -> bool:
    """Whether two plain texts say the same: `yes.` and `Yes`, `I and II` and `II, I`; not `CO` and `Co`.

    Either may repeat what the question asks for: `isosceles triangle` for `isosceles`.
    """
    r = common_notation(reference).strip(_EDGES)
    a = common_notation(answer).strip(_EDGES)
    of_an_element = re.fullmatch("[A-Z][a-z]", r) and _CHEMISTRY.search(question)
    if (of_an_element or _CASE_MATTERS.fullmatch(r)) and r.upper() not in _ANSWERS:
        return r == a
    labels = _labels(r)
    if plain_words(reference) == plain_words(answer) or (labels is not None and labels == _labels(a)):
        return True
    longer, shorter = sorted((r, a), key=len, reverse=True)
    head, _, noun = longer.lower().rpartition(" ")
    return plain_words(head) == plain_words(shorter) and _is_asked_about(noun, question[:20_000].lower())


def _is_asked_about(noun: str, question: str) -> bool:
    """Whether it is the `triangle` of "what kind of triangle is it?", and none of its alternatives."""
    alternative = rf"(?:\bor|\band|,)\s+(?:an? |the )?{noun}\b|\b{noun}\s*(?:,|or\b|and\b)"
    return noun in _HEAD.findall(question) and not re.search(alternative, question)


_HEAD = re.compile(
    r"\b(?:what|which|classify|name)(?: is| the| this| an?| kind| type| of)* (?!not|no)([a-z]{3,20})\b"
)


def _labels(text: str) -> frozenset[str] | None:
    """The members of `I, II and III`, `II only` or `red and blue`; None for anything but such a list."""
    text = re.sub(r"^(?:both|only)\s+|\s+only$", "", text)
    members = re.split(r"\s*(?:,|;|&|(?<![A-Za-z])and(?![A-Za-z]))\s*", text)
    members = [m.strip("()") for m in members if m]
    if len(set(members)) < len(members):
        return None
    if all(map(_LABEL.fullmatch, members)):
        return frozenset(members)
    pair = len(members) == 2 and " and " in text
    return frozenset(map(plain_words, members)) if pair else None


@lru_cache(maxsize=8192)
def plain_words(content: str) -> str:
    r"""Plain text for comparison: case, quotes, edge punctuation, articles and spacing do not matter.

    `\text{Yes}.` -> `yes`; `North-East` -> `northeast`; `是` -> `yes`.
    """
    s = common_notation(content[: 4 * MAX_CHARS]).casefold().strip(_EDGES)
    return _TRANSLATED.get(s) or _BETWEEN_LETTERS.sub("", _ARTICLES.sub("", s))


_BETWEEN_LETTERS = re.compile(r"(?<![0-9])[\s_]+|[\s_]+(?![0-9])|(?<=[^\W\d_])-(?=[^\W\d_])")


IN_WORDS = (
    ("\\mathbb{R}", r"(?:x is )?(?:all|any|every|the set of(?: all)?) (?:real numbers?|reals?)"),
    ("\\emptyset", r"(?:there (?:is|are) )?no (?:real )?solutions?|(?:the )?empty set"),
)


def in_symbols(content: str) -> str:
    """`all real numbers` and `no solution` as sets; anything else stays the same."""
    words = common_notation(content)
    for symbol, pattern in IN_WORDS:
        if re.fullmatch(pattern, words, re.IGNORECASE):
            return symbol
    return content


_MATHS_TEXT = (
    "pi sin cos tan cot sec csc log ln exp sqrt frac lim max min det gcd lcm mod inf infinity oo infty "
    "xy yz xz xyz alpha beta gamma delta theta phi omega lambda mu sigma tau arcsin arccos arctan "
    "sinh cosh tanh "
)
_MATHS = frozenset(_MATHS_TEXT.split())


@lru_cache(maxsize=8192)
def is_text(content: str) -> bool:
    """Whether a reference answer is words (`Yes`, `North America`), not an expression."""
    joined = "\\text{ or" in content or "\\text{ and" in content
    if not content.isascii() or ("\\text" in content and not joined):
        content = common_notation(content)
    s = content.strip().rstrip(".!?")
    tokens = re.findall(r"[^\W\d_]+", s)
    if not tokens or re.search(r"[\\^=<>{}$|+*/;√π×≤≥]", s):
        return False
    if not _MATHS.isdisjoint(map(str.casefold, tokens)):
        return False
    if len(tokens) == 1:
        shortest = 2 if tokens[0] == s.strip("\"'") else 4
        return len(tokens[0]) >= shortest or s in _TRANSLATED
    return max(map(len, tokens)) >= 3 and ("," not in s or _labels(s) is not None)
