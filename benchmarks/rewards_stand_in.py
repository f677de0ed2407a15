"""The original reward server's grading, written again: math-verify over the whole text, with
the original's settings and argument order."""

from __future__ import annotations

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

_ANSWER = LatexExtractionConfig(
    normalization_config=NormalizationConfig(
        nits=False, malformed_operators=False, basic_latex=True, equations=True, boxed="all", units=True
    ),
    boxed_match_priority=0,
    try_extract_without_anchor=False,
)


def verify_math(text: str, reference: str) -> float:
    """1.0 if equal, or if the reference answer cannot be parsed or anything fails, as in the original; else
    0.0."""
    parsed = parse(reference, extraction_mode="first_match", extraction_config=[LatexExtractionConfig()])
    if not parsed:
        return 1.0
    answer = parse(text, extraction_config=[_ANSWER], extraction_mode="first_match")
    try:
        return float(verify(answer, parsed))
    except Exception:
        return 1.0
