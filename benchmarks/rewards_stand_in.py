"""Stand-in of the original reward server for the benchmark: the same calls, written again.

Flask's own threaded server, a pool of 16 processes, and for each answer math-verify over the whole text with
the original's settings and argument order. Labels come with the request here, which spares it the look-up by
prompt text.
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ProcessPoolExecutor

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


def _grade(pair: tuple[str, str]) -> tuple[float, float]:
    text, reference = pair
    form = text.startswith("<think>") and text.endswith("</answer>") and text.count("<think>") == 1
    return float(form), verify_math(text, reference)


def _quiet() -> None:
    for name in ("math_verify.parser", "math_verify.grader", "latex2sympy2_extended.math_normalization"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def main() -> None:
    from flask import Flask, jsonify, request

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    pool = ProcessPoolExecutor(16, initializer=_quiet)
    app = Flask("stand-in")

    @app.get("/health")
    def health():
        return "ok"

    @app.post("/get_reward")
    def get_reward():
        body = request.get_json()
        pairs = zip(body["query"], body["labels"], strict=True)
        graded = [f.result() for f in [pool.submit(_grade, p) for p in pairs]]
        forms, accuracies = zip(*graded, strict=True)
        rewards = [0.5 * f + a for f, a in graded]
        return jsonify({"rewards": rewards, "format_rewards": list(forms), "acc_rewards": list(accuracies)})

    app.run(host="127.0.0.1", port=int(sys.argv[1]), threaded=True)


if __name__ == "__main__":
    main()
