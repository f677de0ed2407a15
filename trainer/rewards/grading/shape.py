"""The shape of an expression, which its value does not tell: work that is left, brackets, factors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from math import gcd

from trainer.rewards.grading.expression_reader import Expression
from trainer.rewards.grading.question import Form
from trainer.rewards.grading.values import Node


def nodes(node: Node) -> Iterator[Node]:
    """The node and all below it."""
    waiting = [node]
    while waiting:
        this = waiting.pop()
        waiting += this.parts
        yield this


def leaves(node: Node) -> Counter[str]:
    """Numbers and symbols, each as often as it occurs; a factor 1 is none."""
    return Counter(n.text for n in nodes(node) if n.operation in ("number", "symbol") and n.text != "1")


def is_stated(node: Node, whole: bool) -> bool:
    r"""Whether it states a number in a customary form: `\sqrt{16}`, `2^3`, `2\sqrt{3}`, not `\frac{6!}{6}`.

    whole: whether the number is whole, so that a quotient of it is a division left undone.
    """
    parts = node.parts
    match node.operation:
        case "number" | "symbol":
            return True
        case "negative" | "absolute":
            return parts[0].operation != "negative" and is_stated(parts[0], whole)
        case "^":
            return parts[1].text != "1" and all(is_stated(part, False) for part in parts)
        case "/":
            quotient = all(part.operation != "/" and "." not in part.text for part in parts)
            return not whole and quotient and all(is_stated(part, True) for part in parts)
        case "root" | "mixed" | "*" | "degrees":
            return all(is_stated(part, whole) for part in parts)
    return False


def folds(node: Node) -> int:
    r"""How many operations on two plain numbers are left: `2 \cdot 3\pi`, `2x + 3 + 3`, `\frac{12\pi}{2}`."""
    count = 0
    inner: set[int] = set()
    for n in nodes(node):
        if n.operation in _FLAT:
            inner.update(id(part) for part in n.parts if part.operation in _FLAT[n.operation])
        if n.operation in _FLAT and id(n) not in inner:
            neutral = "1" if n.operation == "*" else "0"
            plain = sum(_number(part) and part.text != neutral for part in _flat(n))
            count += max(plain - 1, 0)
        elif n.operation == "/":
            top = _coefficient(n.parts[0])
            bottom = _coefficient(n.parts[1])
            count += top is not None and bottom is not None and bottom > 1 and top % bottom == 0
    return count


_FLAT = {"*": ("*",), "+": ("+", "-"), "-": ("+", "-")}
"""Operations in whose place, among those of the same kind, only their parts count."""


def _flat(node: Node) -> list[Node]:
    """The factors of a product, with powers as they are, or the terms of a sum."""
    flat = []
    for part in node.parts:
        flat += _flat(part) if part.operation in _FLAT[node.operation] else [part]
    return flat


def _number(node: Node) -> bool:
    """Whether it is a plain number, or a quotient or small power of two."""
    if node.operation == "^" and (not node.parts[1].text.isdigit() or int(node.parts[1].text) > 4):
        return False
    of_two = node.operation in ("/", "^") and all(part.operation == "number" for part in node.parts)
    return of_two or node.operation == "number"


def _coefficient(node: Node) -> int | None:
    """The whole number by which a product begins; None if it begins with none."""
    first = _flat(node)[0] if node.operation == "*" else node
    return int(first.text) if first.operation == "number" and first.text.isdigit() else None


def factors(node: Node) -> list[Node]:
    """What a product is made of; a sign counts for nothing, a power as often as it says."""
    match node.operation, *node.parts:
        case "*", first, second:
            return factors(first) + factors(second)
        case "negative", part:
            return factors(part)
        case "^", base, exponent if exponent.text.isdigit() and 1 < int(exponent.text) < 20:
            return factors(base) * int(exponent.text)
    return [node]


def terms(node: Node) -> int:
    """How many terms a sum has."""
    if node.operation in ("+", "-"):
        return sum(map(terms, node.parts))
    return terms(node.parts[0]) if node.operation == "negative" else 1


def is_expanded(node: Node) -> bool:
    """Whether no product or power holds a sum."""
    products = [n.parts for n in nodes(node) if n.operation == "*"]
    held = chain(*products, (n.parts[0] for n in nodes(node) if n.operation == "^"))
    return max(map(terms, held), default=1) == 1


def is_factored(node: Node, reference: Node) -> bool:
    """Whether it is a product of as many factors as the reference, and no sum in it has a common factor."""
    if terms(node) > 1 or len(factors(node)) < len(factors(reference)):
        return False
    return max(map(_common, factors(node))) <= max(map(_common, factors(reference)))


def _common(node: Node) -> int:
    """The whole number that divides all terms of a sum; 1 for anything else."""
    return gcd(*(_coefficient(part) or 1 for part in _flat(node))) if terms(node) > 1 else 1


def is_simpler(node: Node, reference: Node) -> bool:
    """Whether it is as short as a reference that is simplified, with no root or fraction larger than its."""
    longer = sum(leaves(node).values()) > sum(leaves(reference).values()) or folds(node) > folds(reference)
    roots = _radicands(reference)
    if longer or (roots and not _radicands(node) <= roots) or _roots_below(node) > _roots_below(reference):
        return False
    return all(map(_reduced, nodes(node))) or not all(map(_reduced, nodes(reference)))


def _radicands(node: Node) -> set[tuple[str, ...]]:
    return {tuple(sorted(leaves(n).elements())) for n in nodes(node) if n.operation == "root"}


def _roots_below(node: Node) -> int:
    """How many roots stand in denominators."""
    below = [n.parts[1] for n in nodes(node) if n.operation == "/"]
    return sum(n.operation == "root" for part in below for n in nodes(part))


def _reduced(node: Node) -> bool:
    """Whether a quotient of numbers is in lowest terms; true of anything else."""
    ends = [_coefficient(part) for part in node.parts] if node.operation == "/" else []
    return None in ends or gcd(*map(int, filter(None, ends))) < 2


def has_asked_form(forms: frozenset[Form], reference: Expression, answer: Expression) -> bool:
    """Whether an expression has the form that a question asks for, as far as the reference has it."""
    wanted, given = reference.value, answer.value
    if "factored" in forms and terms(wanted) == 1 and len(factors(wanted)) > 1:
        return is_factored(given, wanted)
    if "expanded" in forms and is_expanded(wanted) and terms(wanted) > 1:
        return is_expanded(given) and terms(given) <= terms(wanted)
    if "simplified" in forms:
        return is_simpler(given, wanted)
    states_work = "power" in forms or ("expression" in forms and not reference.symbols)
    return not states_work or leaves(given) == leaves(wanted)
