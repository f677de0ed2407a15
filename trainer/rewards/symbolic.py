r"""The last route: math-verify, in `verify(gold, answer)` order, with its false positives caught.

May take any time and memory: run it in a worker that can be killed (`pool.py`). The only file that imports math-verify,
which it does when first used.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from trainer.rewards.notation import clean

MAX_CHARS = 600
"""A longer expression is not looked at."""


class GoldError(ValueError):
    """The gold answer cannot be parsed: the row is wrong, not the answer."""


def preload() -> None:
    """Imports math-verify and fills its caches of compiled patterns, so that forked workers start warm."""
    equal("\\frac{\\sqrt{3}}{2}", "\\frac{3}{2\\sqrt{3}}")
    equal("[1,2)", "1 \\le x < 2")


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


def parse(content: str) -> Any | None:
    """The sympy object of a piece of LaTeX, or None. Units must be off already."""
    s = clean(content).replace("°", "").replace("\n", " ").replace("$", "")
    if not s or len(s) > MAX_CHARS or "\\frac{}" in s:
        return None
    math_verify, config, _ = _library()
    found = math_verify.parse(f"${s}$", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


@lru_cache(maxsize=512)
def _parse_gold(content: str) -> Any | None:
    return parse(content)


def gold_parses(content: str) -> bool:
    """Whether the gold answer means something to math-verify."""
    return _parse_gold(content) is not None


def equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX expressions are mathematically equal. Raises GoldError if the gold cannot be parsed."""
    g = _parse_gold(gold)
    if g is None:
        raise GoldError(f"the gold answer {gold[:80]!r} cannot be parsed: leave the row out")
    a = parse(answer)
    if a is None:
        return False
    math_verify, _, _ = _library()
    if not math_verify.verify(g, a, timeout_seconds=None, allow_set_relation_comp=True):
        return False
    return _agree(g, a)


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
