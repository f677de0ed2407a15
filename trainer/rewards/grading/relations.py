r"""Equations, inequalities and the sets they describe: `2x - y = 1`, `1 \le x < 2`, `(0, 1) \cup [2, 3]`.

Each is read into branches (joined by "or") of elementary relations `f = 0`, `f > 0`, `f \ge 0`, `f \ne
0`. Two relations are one if the quotient of their functions is the same number (a positive one for
inequalities) at every point of `expression.points`; two branches, if their relations pair up; two
answers, if their branches do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain

from trainer.rewards.grading import expression, shape, structures
from trainer.rewards.grading.expression import Expression, Rule, Unreadable
from trainer.rewards.grading.notation import GREEK, is_one_group, split_top

MAX_PARTS = 8

SIGN = re.compile(r"\s*(<|>|=|\\(?:le|ge|ne)(?![a-zA-Z]))\s*")
_SET = re.compile(r"\\(?:cup|setminus|mathbb\{R\})(?![a-zA-Z])")
_MEMBER = re.compile(r"\s*\\in(?![a-zA-Z])\s*")
_BUILDER = re.compile(
    r"\\\{\s*(?P<head>(?:[^:|{}]|\\mathbb\{R\})+?)\s*(?::|\||\\mid(?![a-zA-Z]))\s*(?P<body>.+)\\\}", re.DOTALL
)
_OR = re.compile(r"\s*(?:(?<![A-Za-z\\])or(?![A-Za-z])|\\(?:lor|vee)(?![a-zA-Z]))\s*")
_AND = re.compile(r"\s*(?:,|;|(?<![A-Za-z\\])and(?![A-Za-z])|\\(?:land|wedge)(?![a-zA-Z]))\s*")
_VARIABLE = re.compile(
    rf"(?:(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])|\\(?:{'|'.join(GREEK)})(?![A-Za-z]))(?:_\{{?\w{{1,3}}\}}?)?(?:\([a-z]\))?",
    re.ASCII,
)
_CONSTANTS_TEXT = r"\pi \infty e i \frac \sqrt \le \ge \ne \mid \in \cdot or and"
_CONSTANTS = frozenset(_CONSTANTS_TEXT.split())
_ANY = "⟪member⟫"
"""The variable of a bare set, which has no name."""


@dataclass(frozen=True)
class Relation:
    """Says that `left - right` compares with zero by `sign`, which is `=`, `>`, `\\ge` or `\\ne`."""

    sign: str
    left: str
    right: str


Branches = tuple[tuple[Relation, ...], ...]


def is_relation(s: str) -> bool:
    """Whether a cleaned text has a relation sign or is a set that is not a list."""
    return bool(SIGN.search(s) or _MEMBER.search(s) or _SET.search(s))


def equal(reference: str, answer: str) -> bool:
    """Whether two cleaned relations or sets say the same. Raises Unreadable for either, and Undecided."""
    return _pair(*_both(reference, answer), partial(_pair, same=_same_relation))


def rule(reference: str, answer: str) -> Rule:
    """What decides whether they do. Raises Unreadable for either."""
    relations = chain.from_iterable(sum(_both(reference, answer), ()))
    return expression.rule(*map(_difference, relations))


def _both(reference: str, answer: str) -> tuple[Branches, Branches]:
    variables = _variable(reference), _variable(answer)
    # A bare set takes its variable from the other side.
    wanted = branches(reference, variables[0] or variables[1] or _ANY)
    return wanted, branches(answer, variables[1] or variables[0] or _ANY)


def check(reference: str) -> None:
    """Raises Unreadable if a reference answer cannot be compared."""
    for relation in chain.from_iterable(branches(reference, _variable(reference) or _ANY)):
        _difference(relation)


def work_left(s: str) -> int:
    """How far a cleaned relation or set is from a solution. Raises Unreadable.

    0 gives variables by numbers, 1 by sums and products of numbers (`x = 6 + 6`), 2 is the rest (`2x = 24`).
    """
    most = 0
    for relation in chain.from_iterable(branches(s, _variable(s) or _ANY)):
        name, number = sorted((relation.left, relation.right), key=_is_variable, reverse=True)
        given_by = expression.read(number)
        if not _is_variable(name) or given_by.symbols:
            return 2
        most = max(most, int(given_by.arithmetic or shape.folds(given_by.value) > 0))
    return most


def is_as_long(reference: str, answer: str) -> bool:
    """Whether an equation in one variable holds the numbers of the reference, none of which was worked out;
    true where there are more variables. Raises Unreadable."""
    wanted, given = (
        sum((shape.leaves(expression.read(side).value) for side in SIGN.split(s)[::2]), Counter())
        for s in (reference, answer)
    )
    symbols = [leaf for leaf in wanted if not leaf[0].isdigit()]
    return len(symbols) != 1 or wanted == given


def _is_variable(s: str) -> bool:
    return s == _ANY or (s not in _CONSTANTS and _VARIABLE.fullmatch(s) is not None)


def _variable(s: str) -> str:
    """The variable that a relation is about; empty for a bare set."""
    s = _builder(s)
    if not SIGN.search(s) and not _MEMBER.search(s):
        return ""
    middle = []
    sides: list[str] = []
    for piece in _AND.split(_OR.sub(",", s)):
        chained = SIGN.split(_MEMBER.split(piece)[0])[::2]
        middle += chained[1:2] if len(chained) == 3 else []  # the x of 1 < x < 2
        sides += chained
    names = [name for name in _VARIABLE.findall(s) if name not in _CONSTANTS]
    return next(filter(_is_variable, middle + sides), "") or next(iter(names), "")


def _builder(s: str) -> str:
    """`\\{x \\mid x > 3\\}` -> `x > 3`."""
    if (match := _BUILDER.fullmatch(s)) is None:
        return s
    head, *within = map(str.strip, _MEMBER.split(match["head"]))
    if within and within != ["\\mathbb{R}"]:
        raise Unreadable("a set within another set than the real numbers")
    if not _VARIABLE.fullmatch(head) or head not in _VARIABLE.findall(match["body"]):
        raise Unreadable(f"set of {head!r}")
    return re.sub(r"^\\\{.*", "", match["body"]).strip() or s


@lru_cache(maxsize=1024)
def branches(s: str, variable: str) -> Branches:
    """The alternatives of a relation or set. Raises Unreadable."""
    relations: list[tuple[Relation, ...]] = []
    for part in _OR.split(_builder(s)):
        pieces = _MEMBER.split(part)
        if len(pieces) == 2 and _VARIABLE.fullmatch(pieces[0].strip()):
            relations += _set(pieces[1].strip(), pieces[0].strip())
        elif len(pieces) == 1 and SIGN.search(part):
            relations.append(_chain(part))
        elif len(pieces) == 1:
            relations += _set(part.strip(), variable)
        else:
            raise Unreadable("a membership")
    longest = max(map(len, relations), default=0)
    if len(relations) > MAX_PARTS or longest > MAX_PARTS:
        raise Unreadable("too many parts")
    return tuple(relations)


def _chain(part: str) -> tuple[Relation, ...]:
    """The relations that all hold in `a < b \\le c` or `x > 1, x < 3`."""
    relations: list[Relation | None] = []
    for signs in filter(None, split_top(_AND.sub(",", part))):
        pieces = SIGN.split(signs)
        if len(pieces) < 3 or not all(pieces[::2]):
            raise Unreadable("a relation without two sides")
        relations += map(_oriented, pieces[:-2:2], pieces[1::2], pieces[2::2])
    return tuple(filter(None, relations))


def _oriented(left: str, sign: str, right: str) -> Relation | None:
    """A relation by `>`, `\\ge`, `=` or `\\ne`; None for `x < \\infty`, which says nothing."""
    infinite = (structures.infinite_end(left), structures.infinite_end(right))
    if any(infinite) and sign not in ("=", "\\ne"):
        below = infinite[0] == "-" or infinite[1] == "+"
        if below == (sign in ("<", "\\le")) and not all(infinite):
            return None
        raise Unreadable("beyond infinity")
    if sign in ("<", "\\le"):
        return Relation({"<": ">", "\\le": "\\ge"}[sign], right, left)
    return Relation(sign, left, right)


def _set(s: str, variable: str) -> list[tuple[Relation, ...]]:
    """The branches of a union of intervals, of the real numbers, or of the real numbers without some
    points."""
    whole, *taken = re.split(r"\s*(?:\\setminus(?![a-zA-Z])|(?<=\\mathbb\{R\})\s*[-\\])\s*", s)
    if taken:
        points = structures.parse(taken[0]) if len(taken) == 1 else None
        if whole.strip() != "\\mathbb{R}" or points is None or points.kind != "set":
            raise Unreadable("a difference of sets")
        return [tuple(Relation("\\ne", variable, point) for point in points.parts)]
    relations: list[tuple[Relation, ...]] = []
    for part in re.split(r"\s*\\cup(?![a-zA-Z])\s*", s):
        enclosed = part[:1] == "(" and part[-1:] == ")" and is_one_group(part)
        if enclosed and "," not in part:
            part = part[1:-1]
        if part == "\\mathbb{R}":
            relations.append(())
            continue
        interval = structures.parse(part)
        if interval is None or interval.kind not in structures.INTERVALS or len(interval.parts) != 2:
            raise Unreadable(f"the set {part!r}")
        low_sign, high_sign = ("\\le" if bracket in "[]" else "<" for bracket in interval.kind)
        low, high = interval.parts
        ends = _oriented(low, low_sign, variable), _oriented(variable, high_sign, high)
        relations.append(tuple(filter(None, ends)))
    return relations


def _pair(these: Sequence, those: Sequence, same: Callable) -> bool:
    """Whether the elements of both pair up, one to one, so that the two of a pair are the same."""
    left = list(those)
    for this in these:
        if (i := next((i for i, that in enumerate(left) if same(this, that)), None)) is None:
            return False
        del left[i]
    return not left


@lru_cache(maxsize=2048)
def _difference(relation: Relation) -> Expression:
    return expression.read(f"({relation.left}) - ({relation.right})")


def _same_relation(first: Relation, second: Relation) -> bool:
    """Whether two relations have one sign, and functions whose quotient is a number."""
    if first.sign != second.sign:
        return False
    f, g = _difference(first), _difference(second)
    positive = first.sign in (">", "\\ge")
    if not g.symbols <= f.symbols:
        return False
    return any(expression.proportional(f, g, base, positive) for base in expression.readings(f, g))
