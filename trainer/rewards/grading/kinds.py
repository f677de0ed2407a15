"""What a reference answer is: one kind of a closed union, read once, with its parts.

The order in which kinds are tried is that of what they keep of a text: a code keeps all, a range its two
ends and their order, an expression only its value.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trainer.rewards.grading import expression, option_letters, quantity, relations, structures
from trainer.rewards.grading.dates import ClockTime, date, time_of_day
from trainer.rewards.grading.extraction import unbox
from trainer.rewards.grading.measurement_units import split_unit
from trainer.rewards.grading.notation import common_notation
from trainer.rewards.grading.quantity import Quantity
from trainer.rewards.grading.question import read_question


class BadReferenceError(ValueError):
    """The reference answer cannot be read: the row is wrong, not the completion."""


@dataclass(frozen=True)
class Letters:
    """One of the options, or several where all are to be named."""

    letters: frozenset[str]


@dataclass(frozen=True)
class Number:
    """A number, percentage, sum of money, duration or other quantity with a unit."""

    quantity: Quantity


@dataclass(frozen=True)
class ValueRange:
    """From one value to another, in this order: a bin, a season, a score."""

    low: Quantity
    high: Quantity


@dataclass(frozen=True)
class Bound:
    """All values on one side of one: `65+`, `>5`."""

    sign: str
    value: Quantity


@dataclass(frozen=True)
class Ratio:
    """A ratio (`structures.ratio`): of numbers, divided by the first that is not zero, or of expressions."""

    parts: structures.Ratio


@dataclass(frozen=True)
class Time:
    """A time of day."""

    time: ClockTime


@dataclass(frozen=True)
class Collection:
    """A tuple, point, interval, list, set or matrix, by its brackets."""

    structure: structures.Structure
    ordered: bool = False
    """Whether a list has the order that the question asks for."""


@dataclass(frozen=True)
class Condition:
    """An equation, an inequality, or a set that is no list."""

    text: str


@dataclass(frozen=True)
class Formula:
    """An expression, which only its value tells from others."""


@dataclass(frozen=True)
class Words:
    """A name or a phrase."""


@dataclass(frozen=True)
class Exactly:
    """What stands for itself: a `code` (a version, a part number, `CO_2`, `204_5`), a `day`, or `nothing`:
    the empty set, or that there is no solution."""

    name: str
    key: Any
    """What `key_of` reads the reference answer as."""


Text = Letters | Words | Exactly | Time | ValueRange | Bound
"""Kinds of which nothing may be lost."""
Mathematics = Number | Ratio | Collection | Condition | Formula
"""Kinds of which the value counts."""
Kind = Text | Mathematics

_PLAIN = re.compile(r"-?(?:[1-9][0-9]{0,14}|0)(?:\.[0-9]{1,15})?")
_EMPTY_SET = re.compile(r"\\\{\s*\\\}|\\emptyset(?![a-zA-Z])")
_CODE = re.compile(
    r"[0-9]+\s*\^?\{?\s*(?:st|nd|rd|th)\}?|0[0-9]+|[0-9]+(?:[-/.][0-9]+){2,}|[0-9]*[-/]0[0-9]+|0[0-9]+[-/][0-9]+|[0-9]{1,3}0'?s|[A-Z]{2,}-[0-9]+|[A-Z]{1,3}[0-9]{2,5}|[0-9]+-[A-Z]{1,3}|(?:19|20)[0-9]{2}/[0-9]{2}"
    r"|[0-9A-F]+\s*_\s*(?:[0-9]{1,2}|\{\s*(?:[0-9]{1,2}|[a-z]{3,12})\s*\})|[0-9]{1,2}:[0-9]{2}\s*-\s*[0-9]{1,2}:[0-9]{2}",
    re.ASCII,
)
"""Digits and letters whose arithmetic would lose a zero, a hyphen or a point."""
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:\.[0-9]{3}){2,}")
_ELEMENTS_TEXT = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr "
    "Ag Cd In Sn Sb Te I Xe Cs Ba W Pt Au Hg Pb Bi Ra U"
)
_ELEMENT = rf"(?:{'|'.join(sorted(_ELEMENTS_TEXT.split(), key=len, reverse=True))})"
_COUNT = r"(?:_?(?:[2-9]|\{[0-9]{1,2}\}))?"
_CHEMICAL = re.compile(
    rf"(?=.*[0-9+^])(?=(?:.*[A-Z]){{2}}|.*\^)(?:{_ELEMENT}{_COUNT}){{1,8}}(?:\^?\{{?[0-9]?[+-]\}}?)?"
)
_EVERY_COUNTED = re.compile(rf"(?:{_ELEMENT}_(?:[2-9]|\{{[0-9]{{1,2}}\}}))+")
"""`P_2V_2`: variables with subscripts."""
_FIGURES = re.compile(
    r"\\(?:triangle|parallel|perp|sim|cong|square|rightarrow|to|leftrightarrow)(?![a-z])|[{}]"
)
_BY_LETTERS = re.compile(r"(?=.*[A-Za-z+#&@/-])(?=.*\w)[^\\{}|=<>]{1,80}")
"""What may stand for itself where no mathematics can be read."""


def reading(reference: str, question: str = "") -> str:
    """As what a reference answer is read, and what its question asks for, as JSON for the row."""
    try:
        read = _description(read_kind(unbox(reference), question))
    except BadReferenceError:
        return json.dumps({"kind": "unreadable"})
    wanted = read_question(question)
    read["asked"] = sorted(wanted.forms | wanted.counted)
    return json.dumps({name: value for name, value in read.items() if value}, ensure_ascii=False)


def in_words(read: str) -> str:
    """A reading for people: `ordered list of 0.25, 0.5, 0.75; asked: ordered`."""
    known = json.loads(read)
    of, wanted = (", ".join(known.get(name, ())) for name in ("parts", "asked"))
    ends = (" of ", of), (" in ", known.get("unit")), ("; asked: ", wanted)
    return known["kind"] + "".join(lead + text for lead, text in ends if text)


def _description(kind: Kind) -> dict[str, Any]:
    """The kind in a word or two (`number`, `percent`, `ordered list`), its parts and its unit."""
    match kind:
        case Letters(letters):
            return {"kind": "letter" if len(letters) == 1 else "letters", "parts": sorted(letters)}
        case Number(number) if number.percent or number.unit is None:
            return {"kind": "percent" if number.percent else "number"}
        case Number(number) if number.unit is not None:
            dimensions = number.unit.dimensions
            unit = " ".join(f"{name}^{power}" for name, power in dimensions)
            return {"kind": "money" if dimensions in _MONEY else "quantity", "unit": unit}
        case ValueRange(low, high):
            return {"kind": "range", "parts": [str(low.value), str(high.value)]}
        case Collection(structure, ordered):
            name = "tuple" if structure.kind == "()" else structure.kind
            in_order = ordered or structure.kind not in ("list", "set")
            name = "ordered list" if ordered else name
            return {"kind": name, "parts": list(structure.parts), "ordered": in_order}
        case Exactly(name):
            return {"kind": name}
    return {"kind": type(kind).__name__.lower()}


_MONEY = {((name, 1),) for name in ("dollar", "euro", "sterling", "yen", "yuan", "rupee")}


@lru_cache(maxsize=8192)
def read_kind(reference: str, question: str = "", context: str = "") -> Kind:
    """The kind of a reference answer, as `extraction.unbox` leaves it. Raises BadReferenceError.

    context: question and whole reference answer, where this is a part of one.
    """
    wanted = read_question(question)
    if "code" in wanted.forms and re.fullmatch(
        r"[0-9]+(?:\.[0-9]*0|/[0-9]+|[eE][0-9]+)|[A-Z]{1,3}-[0-9]+", reference
    ):
        return Exactly("code", code_key(reference))
    if (plain := quantity.parse(reference) if _PLAIN.fullmatch(reference) else None) is not None:
        return Number(plain)

    s = common_notation(reference)
    if not s:
        raise BadReferenceError("empty reference answer")
    letter = option_letters.reference_letter(reference, question)
    if letter is not None and not reference.strip().islower():
        return Letters(frozenset(letter))
    if (several := option_letters.letters(reference, question)) is not None:
        return Letters(several)
    return _of_text(reference, s, question) or _of_mathematics(
        reference, s, f"{context or question} {reference}"
    )


def _of_text(reference: str, s: str, question: str) -> Kind | None:
    """The kinds that keep more of a text than its value."""
    if (day := date(reference)) is not None:
        return Exactly("day", day)
    if (time := time_of_day(s)) is not None:
        return Time(time)
    if _CODE.fullmatch(s) and not _THOUSANDS.fullmatch(s):
        return Exactly("code", code_key(s))
    context = f"{question} {reference}"
    if (ends := range_of(s, context)) and "expression" not in read_question(question).forms:
        return ValueRange(*ends)
    if (bound := bound_of(s, context)) is not None:
        return Bound(*bound)
    if _CHEMICAL.fullmatch(s.replace(" ", "")) and not _EVERY_COUNTED.fullmatch(s.replace(" ", "")):
        return Exactly("code", code_key(s))
    return None


def _of_mathematics(reference: str, s: str, context: str) -> Kind:
    """The kinds of which the value counts, and words."""
    symbols = option_letters.in_symbols(reference)
    if key_of("nothing", symbols):
        return Exactly("nothing", True)
    if symbols != reference:
        return Condition(symbols)
    if (number := quantity.parse(reference, context)) is not None:
        return Number(number)
    if option_letters.is_text(reference):
        if not option_letters.plain_words(reference):
            raise BadReferenceError(f"the reference answer {reference[:80]!r} has no words")
        return Words()

    if (ratio := structures.ratio(s)) is not None:
        return Ratio(ratio)
    structure = structures.parse(s)
    wanted = read_question(context)
    if structure is not None and not ("\\in" in s and "matrix" in structure.kind):
        named = "=" in s or structure.kind not in ("list", "set") or s.startswith(("\\{", "{"))
        return Collection(structure, "ordered" in wanted.forms and not named and "\\pm" not in s)
    if relations.is_relation(s):
        return Condition(s)
    bare, measured_in = split_unit(reference, context)
    try:
        expression.read(bare if measured_in else s)
    except expression.Unreadable as error:
        balanced = s.count("(") == s.count(")") and s.count("[") == s.count("]")
        if balanced and _BY_LETTERS.fullmatch(_FIGURES.sub("", s)):
            return Exactly("code", code_key(s))
        raise BadReferenceError(f"{reference[:80]!r}: {error}") from None
    return Formula()


_ENDS = re.compile(
    r"(between |from )?\s*(\S.*?)"
    r"(?:(?<=[\w%°])\s*[-~]\s*(?=[\d＄€£.])|\s(to|and|through|until) )\s*(\S.*)"
)


def range_of(s: str, context: str) -> tuple[Quantity, Quantity] | None:
    """The two values of `20-30`, `5 to 7 years` or `between 10% and 20%`; None for anything else."""
    match = _ENDS.fullmatch(s) if len(s) <= 80 else None
    if match is None or (match[3] == "and") != ((match[1] or "").strip() == "between"):
        return None
    low = quantity.parse(match[2], context)
    high = quantity.parse(match[4], context)
    if low is None or high is None or "fraction" in (low.form, high.form) or low.glued or high.glued:
        return None
    if low.percent and not high.percent or (low.unit and high.unit and low.unit != high.unit):
        return None
    return low, high


_BOUND = re.compile(
    r"(?:(?P<before><|>|\\le|\\ge|over|above|under|below|(?:more|less|fewer) than|at (?:least|most))\s*)?"
    r"(?P<value>[＄€£]?[0-9].*?)"
    r"(?:\s*(?P<after>\+)|\s+(?:and|or) (?P<word>over|above|more|older|up|under|below|less|younger))?"
)
_SIGNS = {sign: sign for sign in ("<", ">", "\\le", "\\ge")}
_SIGNS |= {"+": "\\ge", "at least": "\\ge", "at most": "\\le"}
_SIGNS |= dict.fromkeys(("over", "above", "more than"), ">")
_SIGNS |= dict.fromkeys(("under", "below", "less than", "fewer than"), "<")


def bound_of(s: str, context: str) -> tuple[str, Quantity] | None:
    """Sign and value of `65+`, `>5` or `10 and under`; None for anything else."""
    match = _BOUND.fullmatch(s) if len(s) <= 60 else None
    if match is None or bool(match["before"]) == bool(match["after"] or match["word"]):
        return None
    if match["word"]:
        sign = "\\le" if match["word"] in ("under", "below", "less", "younger") else "\\ge"
    else:
        sign = _SIGNS[match["before"] or match["after"]]
    value = quantity.parse(match["value"], context)
    return None if value is None else (sign, value)


_LEAD = re.compile(r"(?:the )?(?:version|release|code|number|score)\s+(?=\S)|the (?=[0-9])|[v#](?=[0-9])")
_LATE = re.compile(r"\^(?=\s*\{?\s*(?:[+-]|st|nd|rd|th))|[{}\s]|(?<![0-9])_")
_ORDINALS_TEXT = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
_ENDINGS = {1: "st", 2: "nd", 3: "rd"}
_ORDINALS = {word: f"{n}{_ENDINGS.get(n, 'th')}" for n, word in enumerate(_ORDINALS_TEXT.split(), 1)}


@lru_cache(maxsize=8192)
def code_key(text: str) -> str:
    """The characters of a code by which it is compared: spaces and braces do not matter, nor does case, but
    that of chemical formulas."""
    s = common_notation(text)
    chemical = _CHEMICAL.fullmatch(s.replace(" ", "")) is not None
    s = s if chemical else _LEAD.sub("", s.lower(), count=1)
    s = _LATE.sub("", _ORDINALS.get(s, s)).rstrip(".,;:!?").strip("\"'`")
    return s.replace(".", "") if re.fullmatch(r"(?:[a-z]\.)+[a-z]", s) else s


def key_of(name: str, text: str) -> Any:
    """What a text is as a kind of `Exactly`: equal keys are one answer; None or False for no such kind."""
    if name == "nothing":
        return _EMPTY_SET.fullmatch(common_notation(option_letters.in_symbols(text))) is not None
    return date(text) if name == "day" else code_key(text)
