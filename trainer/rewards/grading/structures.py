r"""Answers with parts: tuples, points, intervals, sets, lists, ratios and clock times.

Taken apart here, so that each part is compared by its own kind and the brackets keep their meaning: a
point is no set, a closed interval no open one, and one number never equals a list that holds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Literal

from trainer.rewards.grading import quantity
from trainer.rewards.grading.notation import common_notation, is_one_group, open_brackets, split_top
from trainer.rewards.grading.question import read_question

MAX_CHARS = 500

Kind = str
"""`()`, `[]`, `(]`, `[)`, `set`, `list`, or `2x3 matrix`, `2x2 determinant`."""

INTERVALS = frozenset(("()", "[]", "(]", "[)"))
"""Kinds that are intervals where they have two parts."""


@dataclass(frozen=True)
class Structure:
    """Two or more parts in brackets or in a list without brackets; a set may have one part."""

    kind: Kind
    parts: tuple[str, ...]


_MEMBER = re.compile(r"^[A-Za-z]\s*\\in\s*(?=[(\[\\])", re.ASCII)
_AND = re.compile(r"(?:,\s*)?(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", re.ASCII)
_OR = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])", re.ASCII)
_NAMED = re.compile(r"([A-Za-z](?:_\{?\w{1,3}\}?)?)\s*=\s*([^=<>]+)", re.ASCII)
_NEEDS_ALGEBRA = re.compile(r"\\(?:cup|cap|begin|mp|setminus|mid)(?![a-zA-Z])|[<>|]|\\[lgn]e(?![a-zA-Z])")


@lru_cache(maxsize=8192)
def parse(content: str) -> Structure | None:
    """Reads a structure, or None for a single value or something that needs algebra (unions,
    inequalities)."""
    if len(content) > MAX_CHARS:
        return None
    s = _MEMBER.sub("", common_notation(content))
    if (matrix := _MATRIX.fullmatch(s)) is not None:
        return _matrix(matrix)
    if not s or _NEEDS_ALGEBRA.search(s):
        return None

    s = s.replace("\\langle", "(").replace("\\rangle", ")")
    if s.startswith("\\{") and s.endswith("\\}"):
        parts = _parts(s[2:-2])
        return Structure("set", parts) if parts else None
    if s[0] == "{" and s[-1] == "}":
        parts = _parts(s[1:-1])
        # LaTeX groups by plain braces, so a single part in them is no set.
        return Structure("set", parts) if len(parts) > 1 else None
    if s[0] in "([" and s[-1] in ")]" and is_one_group(s):
        return _bracketed(s)
    return _listed(s)


def _bracketed(s: str) -> Structure | None:
    """A tuple, point or interval."""
    inside = s[1:-1]
    parts = tuple(split_top(inside))
    if len(parts) < 2 or not all(parts) or "\\pm" in s:
        return None
    if s[0] == "[" and quantity.parse(inside):  # the comma of [1,234]
        return None
    return Structure(s[0] + s[-1], parts)


def _listed(s: str) -> Structure | None:
    """A list without brackets. It has no order if its parts are values of one name, or joined by "and"."""
    parts = _parts(s)
    names = set(filter(None, (name for name, _ in _names_and_values(parts))))
    # x = 1 or y = 2 has no two values
    if len(parts) < 2 or (len(names) > 1 and _OR.search(s)):
        return None
    values_of_one_name = "=" in s and not any("=" in part for part in parts)
    joined = "=" not in s and _AND.search(s)
    return Structure("set" if values_of_one_name or joined or "\\pm" in s else "list", parts)


_MATRIX = re.compile(
    r"[(\[|]?\s*\\begin\{([pbvB]?matrix|smallmatrix|array)\}\s*(?:\{[lcr|\s]*\})?(.*)\\end\{\1\}\s*[)\]|]?",
    re.DOTALL,
)


def _matrix(match: re.Match[str]) -> Structure | None:
    """A matrix or determinant, row by row. None unless all rows are equally long and no entry is empty."""
    rows = []
    for row in re.split(r"\\\\|\\cr(?![a-zA-Z])", match[2].strip()):
        rows.append(list(map(str.strip, row.split("&"))))
    if rows[-1] == [""]:
        rows.pop()
    cells = tuple(chain(*rows))
    if "\\begin" in match[2] or len(set(map(len, rows))) != 1 or not all(cells):
        return None
    bars = match[1] == "vmatrix" or match[0].startswith("|")
    return Structure(f"{len(rows)}x{len(rows[0])} {'determinant' if bars else 'matrix'}", cells)


def _parts(s: str) -> tuple[str, ...]:
    r"""The parts of a list, without a name that all of them share: `x = 1, 2` -> 1 and 2. A part with one
    `\pm` is two. No parts if one is empty or has several such signs."""
    if quantity.parse(s):  # the comma of 1,234
        return (s.strip(),)
    depths = [0, *open_brackets(s)]
    s = _AND.sub(lambda m: m[0] if depths[m.start()] else ",", s)
    parts = list(chain.from_iterable(map(_signs, split_top(s))))
    if not all(parts) or any("\\pm" in part for part in parts):
        return ()
    names, stated = zip(*_names_and_values(parts), strict=True)
    one_name = len(set(filter(None, names))) == 1
    # x = 1, x = 2 or x = 1, 2
    return stated if one_name and (all(names) or not any(names[1:])) else tuple(parts)


def _names_and_values(parts: Iterable[str]) -> list[tuple[str, str]]:
    """(name, value) of each part, such as `x = 1`. The name is empty where a part has none."""
    matches = ((part, _NAMED.fullmatch(part)) for part in parts)
    return [(match[1], match[2].strip()) if match else ("", part) for part, match in matches]


def _signs(part: str) -> list[str]:
    r"""The two values of `1 \pm x`, `1 + x` and `1 - x`; a part with more such signs needs algebra."""
    if part.count("\\pm") != 1:
        return [part]
    return [part.replace("\\pm", sign).lstrip("+ ") for sign in "+-"]


def values(structure: Structure, by_name: bool = False) -> Structure:
    """The parts without their names, if every part has one: `q = 2, p = 5` -> the tuple 2, 5; `by_name`
    5, 2."""
    if structure.kind not in ("list", "set"):
        return structure
    pairs = _names_and_values(structure.parts)
    if not all(name for name, _ in pairs):
        return structure
    if by_name:
        pairs.sort()
    return Structure("()", tuple(value for _, value in pairs))


def compatible(
    reference: Structure, answer: Structure, context: str = ""
) -> Literal["ordered", "unordered", "no"]:
    """The way in which the parts of two structures must be compared.

    A bare list is taken for what the reference is; tuples and intervals are ordered, sets and bare
    lists are not. A column is the tuple of its entries. `[11, 13]` is a list, as MathVista writes it, if
    its parts are numbers and the question (in `context`) does not ask for an interval.
    """
    kinds = {reference.kind, answer.kind}
    same_length = len(reference.parts) == len(answer.parts)
    if kinds <= {"set", "list"}:
        # Spaces do not tell two parts apart.
        first, second = ({part.replace(" ", "") for part in s.parts} for s in (reference, answer))
        as_many = len(first) == len(second) and same_length
        return "unordered" if as_many or "set" in kinds else "no"
    if "list" in kinds and reference.kind in INTERVALS and re.search(r"\bintervals?\b", context):
        return "no"
    column = f"{len(reference.parts)}x1 matrix"
    same_kind = len(kinds) == 1 or kinds in ({"()", "list"}, {"()", column})
    if reference.kind == "[]" and answer.kind == "list" and "interval" not in read_question(context).forms:
        same_kind = all(map(quantity.parse, reference.parts))
    return "ordered" if same_kind and same_length else "no"


def infinite_end(end: str) -> str:
    """`-` or `+` for an infinite end of an interval, else empty."""
    bare = re.sub(r"[\s{}]", "", end)
    return {"\\infty": "+", "+\\infty": "+", "-\\infty": "-"}.get(bare, "")


_RATIO = re.compile(r"([0-9]+(?:\.[0-9]+)?)((?:\s*(?::|to)\s*[0-9]+(?:\.[0-9]+)?){1,4})", re.ASCII)
_NO_RATIO = re.compile(r"[=<>|,]|\\[{}]|\\in(?![a-z])")
Ratio = tuple[quantity.Fraction, ...] | tuple[str, ...]


@lru_cache(maxsize=8192)
def ratio(content: str) -> Ratio | None:
    r"""The parts of `3:4` or `3 to 4:5`, divided by the first that is not zero, or the texts of those of
    `\sqrt{2}:1`; None if it is no ratio."""
    if (match := _RATIO.fullmatch(common_notation(content)) if len(content) <= 60 else None) is not None:
        parts = list(map(quantity.Fraction, re.split(r"\s*(?::|to)\s*", match[1] + match[2])))
        unit = next(filter(None, parts), None)
        return tuple(part / unit for part in parts) if unit else None
    texts = split_top(content, ":")
    return tuple(texts) if 2 <= len(texts) <= 4 and all(texts) and not _NO_RATIO.search(content) else None
