r"""The last route: math-verify, in `verify(gold, answer)` order, with its false positives caught.

May take any time and memory: run it in a worker that can be killed (`pool.py`). The only file that imports math-verify,
which it does when first used.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from trainer.rewards.grading.notation import DOLLAR, clean

MAX_CHARS = 600
"""A longer expression is not looked at."""


class GoldError(ValueError):
    """The gold answer cannot be parsed: the row is wrong, not the answer."""


def preload() -> None:
    """Imports math-verify and fills its caches, so that forked workers start warm.

    Its parser learns each form when it first meets it, for 5 to 100 ms; the forms here are the usual ones.
    """
    equal("\\frac{\\sqrt{3}}{2}", "\\frac{3}{2\\sqrt{3}}")
    equal("[1,2)", "1 \\le x < 2")
    for form in ("\\log_{2} x + 1", "\\frac{x^2 - 1}{x + 1}", "(x + 1)(x - 2)^{3}", "\\{1, 2\\}", "x = 2y"):
        parse(form)


@lru_cache(maxsize=1)
def _library() -> tuple[Any, Any, Any]:
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    for name in ("math_verify.parser", "math_verify.grader", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    config = math_verify.LatexExtractionConfig(normalization_config=normalization, boxed_match_priority=-1)
    return math_verify, (config,), __import__("sympy")


_MALFORMED = re.compile(r"(?<![_0-9])[0-9]+\s+[0-9]|[0-9]\.[0-9]*\.|[0-9]_|\\frac\s*\{\s*\}|^\s*[-+]\s*[-+]")
"""What latex2sympy reads as something else: `1 2` as 1 + 2, `1.2.3` as 1.2 times 0.3."""


def parse(content: str) -> Any | None:
    """The sympy object of a piece of LaTeX, or None. Units must be off already."""
    s = _degrees(clean(content)).replace(DOLLAR, "")
    if not s or len(s) > MAX_CHARS or _MALFORMED.search(s):
        return None
    math_verify, config, _ = _library()
    found = math_verify.parse(f"${s}$", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


_OR = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\(?:lor|vee)(?![a-zA-Z])")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")


def _degrees(s: str) -> str:
    """Degrees are radians inside of trigonometric functions and a mere unit elsewhere."""
    if "°" in s and _TRIGONOMETRIC.search(s):
        s = re.sub(r"([0-9]+(?:\.[0-9]+)?)\s*°", r"{(\\frac{\1 \\pi}{180})}", s)
    return s.replace("°", "")


def _parse_any(content: str) -> Any | None:
    """Like `parse`; inequalities joined by "or" become the union of their sets."""
    branches = _OR.split(clean(content))
    if len(branches) == 1 or not any(c in content for c in "<>≤≥") and "\\" not in content:
        return parse(content)
    sets = [_as_set(parse(b)) for b in branches[:8]]
    return _library()[2].Union(*sets) if all(s is not None for s in sets) else parse(content)


def _as_set(relation: Any) -> Any | None:
    try:
        return relation.as_set() if hasattr(relation, "as_set") else None
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        return None


@lru_cache(maxsize=512)
def _parse_gold(content: str) -> Any | None:
    return _parse_any(content)


def gold_parses(content: str) -> bool:
    """Whether the gold answer means something to math-verify."""
    return _parse_gold(content) is not None


def equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX expressions are mathematically equal. Raises GoldError if the gold cannot be parsed."""
    g = _parse_gold(gold)
    if g is None:
        raise GoldError(f"the gold answer {gold[:80]!r} cannot be parsed: leave the row out")
    a = _parse_any(answer)
    if a is None or not _same_case(gold, answer):
        return False
    math_verify, _, _ = _library()
    if not math_verify.verify(g, a, timeout_seconds=None, allow_set_relation_comp=True):
        return False
    return _agree(g, a)


_COMMAND = re.compile(r"\\[a-zA-Z]+|[A-Za-z]{4,}")


def _same_case(gold: str, answer: str) -> bool:
    """latex2sympy lowers all letters, but R and r are two variables."""
    known, said = ({c for c in _COMMAND.sub(" ", clean(s)) if c.isalpha()} for s in (gold, answer))
    return not any(c not in known and c.swapcase() in known for c in said)


def _agree(gold: Any, answer: Any) -> bool:
    """Independent check of a yes: both sides evaluated in 30 digits, at fixed points where there are symbols.

    math-verify compares differences against an absolute tolerance, so it takes 2^-99 for 2^-98 and 1/2004! for 1/2006!.
    Only scalars can be checked so; sets, relations and matrices pass.
    """
    sympy = _library()[2]
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return True
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if len(symbols) > 8:
        return True
    points = [sympy.Rational(7 * i + 5, 11 + i) for i in range(len(symbols))]
    values = dict(zip(symbols, points, strict=True))
    try:
        g, a = (sympy.N(e.doit().subs(values), 30) for e in (gold, answer))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return True
    if not (g.is_number and a.is_number and g.is_finite and a.is_finite):
        return True
    return bool(abs(g - a) <= sympy.Float("1e-9") * max(abs(g), abs(a)))
