r"""Names of values in front of an equals sign: `x = 5`, `m\angle ABC = 60°`, `(x, y) = (1, 2)`."""

from __future__ import annotations

import re

from trainer.rewards.grading.measurement_units import nouns
from trainer.rewards.grading.notation import split_top

_SYMBOL = r"(?:\\?[a-zA-Z]+|\\(?:vec|bar|hat|overline)\s*\{[a-zA-Z]{1,3}\})(?:_(?:\w|\{\w{1,6}\}))?'*"
_NAME = re.compile(
    rf"(?:m\s*)?\(?\\(?:angle|triangle)\s*[A-Za-z0-9]{{1,4}}\)?|[A-Z]{{1,4}}|\|[A-Za-z]{{1,2}}\||{_SYMBOL}"
    rf"|{_SYMBOL}\s*\([^()=]{{1,24}}\)|\\(?:sin|cos|tan)\s*\(?(?:\\angle\s*)?(?:[A-Za-z]|\\[a-z]+)\)?"
    rf"|\\frac\s*\{{\s*d\s*[a-z]\s*\}}\s*\{{\s*d\s*[a-z]\s*\}}|\\frac\s*\{{[A-Z]{{1,3}}\}}\s*\{{[A-Z]{{1,3}}\}}"
    rf"|{_SYMBOL}\s*:\s*{_SYMBOL}",
    re.ASCII,
)
r"""A name of a value, left of an equals sign: `x_1`, `f(2)`, `m\angle ABC`, `AB`, `\sin A`."""
_TUPLE_OF_NAMES = re.compile(rf"\(\s*{_SYMBOL}(?:\s*,\s*{_SYMBOL}){{1,3}}\s*\)", re.ASCII)
_TUPLES = re.compile(r"\(([^()=]*,[^()=]*)\)\s*=\s*\((.*,.*)\)")
_WORDS = re.compile(r"[A-Za-z]{2,20}(?:\s+[A-Za-z]{2,20}){0,5}", re.ASCII)
_QUANTITIES_TEXT = (
    "area perimeter volume length width height radius diameter circumference probability answer result "
    "total value distance speed velocity time cost price number mean median mode average range slope ratio "
    "ans the of "
)
_QUANTITIES = frozenset(_QUANTITIES_TEXT.split())
_LEAD = re.compile(
    r"\A(?:(?:so|thus|hence|therefore),? )?(?:the )?(?:final |correct )?(?:answer|result|value) "
    r"(?:is|equals)(?: equal to)?:? ",
    re.ASCII | re.IGNORECASE,
)
_POINT = re.compile(r"[A-Z]\s*(\([^()]*,.*\))", re.ASCII)
_FUNCTION = re.compile(r"(y|[a-zA-Z]\s*\(\s*[a-xz]\s*\))\s*=\s*([^=]+)", re.ASCII)
_EQUALS = re.compile(r"\s*(?:=|\\approx(?![a-zA-Z]))\s*")


def strip_name(s: str, other: str, context: str) -> str:
    """`s` without a name in front (`x =`), if `other` has no equals sign.

    If it has one, `(x, y) = (1, 2)` becomes `x = 1, y = 2`. context: question and reference answer.
    """
    if (pair := _TUPLES.fullmatch(s) if "=" in other else None) is not None:
        names, values = split_top(pair[1]), split_top(pair[2])
        return s if len(names) != len(values) else ", ".join(map("{} = {}".format, names, values))
    s = _LEAD.sub("", s)
    point = _POINT.fullmatch(s) if other.startswith("(") else None
    if point is not None:
        return point[1]
    sides = _EQUALS.split(s)
    if len(sides) != 2 or not sides[1] or "=" in other or "\\approx" in other:
        return s
    return sides[1] if may_name(sides[0], other, context) or _is_asked_for(sides[0], context) else s


def may_name(name: str, value: str, context: str) -> bool:
    """Whether this may name a value: not one that holds it, and so is another thing (`CO = CO_2`), nor
    another symbol (`O_3 = O_2`), nor a segment between points that the question does not have (`CD`)."""
    if not is_name(name, context) or re.search(rf"(?<![A-Za-z\\]){re.escape(name)}(?![A-Za-z])", value):
        return False
    if re.fullmatch(_SYMBOL, value) and name not in context:
        return False
    points = set("".join(re.findall(r"\b[A-Z]{2,4}\b", context)))
    return not points or re.fullmatch("[A-Z]{2}", name) is None or points.issuperset(name)


_OF_NAMES = re.compile(r"[a-zA-Z]\w?(?:\s*[-+*/^]\s*\w{1,3}){1,6}", re.ASCII)


def _is_asked_for(side: str, context: str) -> bool:
    """Whether it is an expression of names that the question has: the `m + n` of "find m+n"."""
    return _OF_NAMES.fullmatch(side) is not None and side.replace(" ", "") in context.replace(" ", "")


def is_name(s: str, context: str) -> bool:
    """Whether this is a name of a value: never a denial, and a tuple only in the order of the
    alphabet."""
    if _TUPLE_OF_NAMES.fullmatch(s):
        parts = list(map(str.strip, s[1:-1].split(",")))
        asked_so = s.replace(" ", "") in context.replace(" ", "")
        return asked_so or parts == sorted(parts)
    if _WORDS.fullmatch(s) and not _NAME.fullmatch(s):
        names = nouns(context) | _QUANTITIES
        return names.issuperset(s.lower().split())
    match = _NAME.fullmatch(s)
    if match is None or not re.fullmatch(r"[A-Za-z]{2,}", s):
        return match is not None
    return (s.isupper() and len(s) <= 4) or s.lower() in nouns(context) | _QUANTITIES


def function_bodies(reference: str, answer: str) -> tuple[str, str]:
    """The right sides of `y = …` and `f(x) = …`, if one side has each form; else both as they are."""
    left = _FUNCTION.fullmatch(reference)
    right = _FUNCTION.fullmatch(answer)
    if left is None or right is None:
        return reference, answer
    if (left[1] == "y") == (right[1] == "y") or "y" in left[2]:
        return reference, answer
    return left[2], right[2]
