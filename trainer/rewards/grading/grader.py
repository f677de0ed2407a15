r"""The grader: is this answer the gold one? Pure functions of strings.

The label comes with the request; nothing is looked up by the text of a prompt. Only the last box in the `<answer>`
block counts. Typed routes are tried in order, each exact about what it accepts: letter, number, text, structure
(`(1, 2)`, `3:4`, `12:05`), and last math-verify, which alone may be slow. `decide_fast` takes all routes but that one
and cannot hang; `grade` takes all and belongs into a worker process that can be killed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from trainer.algorithm.records import Verdict
from trainer.data.schema import AnswerType
from trainer.rewards.grading import arithmetic, choices, polynomial, quantity, structures, symbolic
from trainer.rewards.grading.extraction import MAX_BOX_CHARS, final_answer, format_reward, unbox
from trainer.rewards.grading.notation import clean
from trainer.rewards.grading.symbolic import GoldError
from trainer.rewards.grading.units import split_unit

__all__ = ["GoldError", "classify", "decide", "decide_fast", "format_reward", "gold_error", "grade"]

Symbolic = Callable[[str, str], bool]


class _NeedsAlgebra(Exception):
    """Raised on the fast path where only math-verify can tell."""


def grade(answer_text: str, gold: str, answer_type: AnswerType) -> Verdict:
    """Grades one whole answer of the model.

    Args:
        answer_text: the model's answer with its think and answer blocks.
        gold: the content of the gold box; `$…$` and `\\boxed{…}` around it are taken off.
        answer_type: the route (`classify(gold)`).

    Returns:
        "correct", "wrong", "no_answer" (no complete box in an answer block), or "error" (the gold cannot be parsed).
        May take arbitrarily long for answer_type "math" and for numbers written as expressions.
    """
    content, hedged = final_answer(answer_text)
    if content is None:
        return "no_answer"
    return decide("" if hedged else content, gold, answer_type)


def decide(content: str, gold: str, answer_type: AnswerType) -> Verdict:
    """Grades the content of a box. "error" if the gold cannot be parsed."""
    try:
        return "correct" if _equal(unbox(gold), unbox(content), answer_type, symbolic.equal) else "wrong"
    except GoldError:
        return "error"


def decide_fast(content: str, gold: str, answer_type: AnswerType) -> Verdict | None:
    """Like `decide`, by the form of the strings alone: bounded time. None where algebra is needed."""
    try:
        return "correct" if _equal(unbox(gold), unbox(content), answer_type, _refuse) else "wrong"
    except GoldError:
        return "error"
    except (_NeedsAlgebra, RecursionError):
        return None


def classify(gold: str) -> AnswerType:
    """The route for a gold answer."""
    gold = unbox(gold)
    if choices.letter(gold) and not gold.strip().islower():
        return "letter"
    if quantity.parse(gold) is not None:
        return "number"
    return "text" if choices.is_text(gold) else "math"


def gold_error(gold: str, answer_type: AnswerType) -> str | None:
    """Why a gold answer cannot be graded against, or None if it can. Slow for "math", like `grade`.

    Besides parsing, the gold must be equal to itself: what no answer can match is a data error too.
    """
    content = unbox(gold)
    if not content or not clean(content):
        return "empty gold answer"
    if len(content) > MAX_BOX_CHARS:
        return f"gold answer longer than {MAX_BOX_CHARS} characters"
    try:
        if not _equal(content, content, answer_type, symbolic.equal):
            return f"gold answer {content[:80]!r} does not equal itself as {answer_type}"
    except GoldError:
        return f"unparseable gold answer {content[:80]!r} ({answer_type})"
    except RecursionError:
        return f"gold answer {content[:80]!r} is nested too deeply"
    return None


def _refuse(gold: str, answer: str) -> bool:
    raise _NeedsAlgebra


def _equal(gold: str, answer: str, answer_type: AnswerType, algebra: Symbolic) -> bool:
    if not gold:
        raise GoldError("empty gold answer")
    if not answer or len(answer) > MAX_BOX_CHARS:
        return False
    match answer_type:
        case "letter":
            wanted = choices.letter(gold)
            if wanted is None:
                raise GoldError(f"the gold answer {gold[:80]!r} is no option letter")
            return choices.letter(answer) == wanted
        case "text":
            if not choices.words(gold):
                raise GoldError(f"the gold answer {gold[:80]!r} has no words")
            return choices.words(gold) == choices.words(answer)
        case "number":
            if quantity.parse(gold) is None:
                raise GoldError(f"the gold answer {gold[:80]!r} is no number")
            return _math_equal(gold, answer, algebra)
    if choices.is_text(gold):
        return choices.words(gold) == choices.words(answer)
    if quantity.parse(gold) is not None:
        return _math_equal(gold, answer, algebra)
    (gold, wanted_unit), (answer, unit) = split_unit(gold), split_unit(answer)
    return (not wanted_unit or not unit or wanted_unit == unit) and _math_equal(gold, answer, algebra)


_NAME = re.compile(
    r"(?=[^=]*[a-zA-Z|])(?:\([^()=]{1,12}+\)|(?!\\approx)[a-zA-Z\\{}()|:,'\s∠]|_\{?\w{1,6}+\}?)++"
    r"(?:=|\\approx)\s*(?P<value>[^=]++)",
    re.ASCII,
)
"""`x = 5`, `m\\angle ABC = 60`, `f(2) = 5`, `(p, q) = (3, 2)`: a name, never a number, before one equals sign.

Possessive throughout: a name of letters and underscores can be cut up in exponentially many ways.
"""
_RELATION = re.compile(
    r"[<>]|\\(?:le|ge|ne|in|notin|subset|cup|cap|setminus|to|rightarrow|Rightarrow|iff|implies|equiv|approx|sim|mid)(?![a-zA-Z])"
)
_HEDGE = re.compile(r"\\(?:pm|mp|lor|vee|land|wedge)(?![a-zA-Z])|(?<![A-Za-z\\])(?:or|and|not)(?![A-Za-z])")


def _math_equal(gold: str, answer: str, algebra: Symbolic, inner: bool = False) -> bool:
    """Numbers, then structures, then algebra; parts of structures come back here (`inner`)."""
    gold, answer = clean(gold), clean(answer)
    if not gold:
        raise GoldError("empty gold answer")
    gold, answer = _unnamed(gold, answer), _unnamed(answer, gold)
    g, a = quantity.parse(gold), quantity.parse(answer)
    if g is not None and a is not None:
        return quantity.equal(g, a)
    if (time := structures.clock(gold)) is not None:
        said = structures.clock(answer)
        return said is not None and structures.same_time(time, said)
    if (ratio := structures.ratio(gold)) is not None:
        return _ratio_equal(ratio, answer)
    if (based := structures.based(gold)) is not None:
        return structures.based(answer) == based
    gs, as_ = structures.parse(gold), structures.parse(answer)
    if as_ is None and "=" in answer and "=" not in gold and not _RELATION.search(answer):
        sides = answer.split("=")  # 1/2 = 0.5 states one number, 61 = 60 and A = B state none
        return len(sides) <= 4 and not inner and all(_math_equal(gold, side, algebra, inner=True) for side in sides)
    if (gs is None or as_ is None) and (_RELATION.search(gold) or _RELATION.search(answer)):
        intervals = structures.interval(gold), structures.interval(answer)
        if intervals[0] is not None and intervals[1] is not None:
            return _intervals_equal(*intervals[0], *intervals[1], algebra)
    if gs is not None and as_ is not None:
        return _structures_equal(gs, as_, algebra, inner)
    if gs is None and as_ is not None and not _RELATION.search(gold) and not _HEDGE.search(gold):
        return as_.kind == "set" and len(as_.parts) == 1 and _math_equal(gold, as_.parts[0], algebra)
    if gs is not None and gs.kind in ("set", "list") and _RELATION.search(answer):
        return False
    if gs is not None and as_ is None and not _RELATION.search(answer) and not _HEDGE.search(answer):
        return gs.kind == "set" and len(gs.parts) == 1 and _math_equal(gs.parts[0], answer, algebra)
    if gs is None and _HEDGE.search(answer) and not _HEDGE.search(gold) and "\\cup" not in gold:
        return False
    if g is not None:
        return _expression_equals_number(g, answer, algebra, gold)
    if _RELATION.search(answer) and gs is None and not _RELATION.search(gold):
        return False
    return _expressions_equal(gold, answer, algebra)


def _unnamed(s: str, other: str) -> str:
    """Takes `x =` off where the other side has no equals sign."""
    if "=" in other or "\\approx" in other:
        return s
    match = _NAME.fullmatch(s)
    return match["value"].strip() if match else s


def _expression_equals_number(g: quantity.Quantity, answer: str, algebra: Symbolic, gold: str) -> bool:
    """A number as gold and something unsimplified as answer: `\\sqrt{16}`, `2^3`, `3 \\cdot 4`; 3:4 for 3/4."""
    if (ratio := structures.ratio(answer)) is not None:
        return (
            structures.clock(answer) is None
            and len(ratio) == 2
            and ratio[1] != 0
            and g.decimals < 0
            and g.value == ratio[0] / ratio[1]
        )
    if "=" in answer or _RELATION.search(answer) or "," in answer or ":" in answer:
        return False
    if not re.search(r"[0-9\\]", answer) and not re.search(r"[+\-*/^]", answer):
        return False
    value = g.value / 100 if g.percent else g.value
    sign = "-" if value < 0 else ""
    exact = f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}" if value.denominator > 1 else str(value)
    return _expressions_equal(exact, answer, algebra)


def _expressions_equal(gold: str, answer: str, algebra: Symbolic) -> bool:
    """Algebra, spared where both sides are plain: different values are unequal, the same polynomial is equal."""
    if arithmetic.evaluate(gold) is not None and arithmetic.evaluate(answer) is not None:
        if gold.replace(" ", "") == answer.replace(" ", ""):
            return True
        if arithmetic.differ(gold, answer):
            return False
        if polynomial.same(gold, answer):
            return True
    return algebra(gold, answer)


def _ratio_equal(gold: tuple[quantity.Fraction, ...], answer: str) -> bool:
    said = structures.ratio(answer)
    if said is not None:
        return said == gold
    number = quantity.parse(answer)
    if number is None or number.percent or number.unit or len(gold) != 2 or not gold[1]:
        return False
    return number.decimals < 0 and number.value == gold[0] / gold[1]


def _structures_equal(gold: structures.Structure, answer: structures.Structure, algebra: Symbolic, inner: bool) -> bool:
    """Part by part. Sets within sets only by spelling: trying all pairs at every level takes exponential time."""
    if not any("=" in part for part in answer.parts):
        gold = structures.values(gold)
    match structures.compatible(gold, answer):
        case "ordered":
            return all(_math_equal(g, a, algebra, inner=True) for g, a in zip(gold.parts, answer.parts, strict=True))
        case "unordered" if inner:
            return set(gold.parts) == set(answer.parts)
        case "unordered":
            return _covers(gold.parts, answer.parts, algebra) and _covers(answer.parts, gold.parts, algebra, swap=True)
    return False


def _intervals_equal(
    name: str, gold: structures.Structure, said: str, answer: structures.Structure, algebra: Symbolic
) -> bool:
    """Same variable (if both name one), same ends, same brackets; a bracket at infinity does not count."""
    if name and said and name != said:
        return False
    for side in (0, 1):
        g, a = gold.parts[side], answer.parts[side]
        if structures.infinite(g) or structures.infinite(a):
            if structures.infinite(g) != structures.infinite(a):
                return False
        elif gold.kind[side] != answer.kind[side] or not _math_equal(g, a, algebra, inner=True):
            return False
    return True


def _covers(these: tuple[str, ...], those: tuple[str, ...], algebra: Symbolic, swap: bool = False) -> bool:
    """Whether each of `these` equals one of `those`."""
    if len(these) > 20 or len(those) > 20:
        return these == those
    pairs = (((b, a) if swap else (a, b) for b in those) for a in these)
    return all(any(_math_equal(g, a, algebra, inner=True) for g, a in row) for row in pairs)
