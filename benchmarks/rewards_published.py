"""math-verify's own published test pairs, graded by this grader; each disagreement with its explanation.

The pairs are not ours, so they are read from the package's source distribution:

    python -m pip download math-verify==0.9.0 --no-deps --no-binary math-verify --dest /tmp/sdist
    python -m benchmarks.rewards_published /tmp/sdist/math_verify-0.9.0.tar.gz
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer import config
from trainer.rewards.grading import grader
from trainer.rewards.grading.extraction import boxed_contents
from trainer.rewards.scorer import Scorer

EXPLANATIONS = Path(__file__).with_name("rewards_published.explanations.json")
RESULT = Path(__file__).with_name("rewards_published.json")
_ENVIRONMENT = re.compile(
    r"\s*(?:\$\$(?P<a>.+?)\$\$|\$(?P<b>[^$]+)\$|\\\[(?P<c>.+?)\\\]|\\\((?P<d>.+?)\\\))\s*\.?\s*", re.DOTALL
)


def pairs(sdist: Path) -> Iterator[tuple[str, str, str, bool]]:
    """Yields (test and row, reference, prediction, expected to be equal) from the parametrized tests."""
    with tarfile.open(sdist) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            file = archive.extractfile(member) if "/tests/test_" in member.name else None
            if file is None:
                continue
            for function in ast.walk(ast.parse(file.read())):
                if isinstance(function, ast.FunctionDef):
                    for i, row in enumerate(_rows(function)):
                        yield f"{Path(member.name).stem}::{function.name}[{i}]", *row


def _rows(function: ast.FunctionDef) -> Iterator[tuple[str, str, bool]]:
    for decorator in function.decorator_list:
        if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.parametrize"):
            continue
        names = [n.strip() for n in ast.literal_eval(decorator.args[0]).split(",")]
        if names[:2] != ["gold", "pred"]:
            continue
        try:
            rows = ast.literal_eval(decorator.args[1])
        except ValueError:  # computed at import: sqrt(17) against fifteen digits of it
            continue
        for row in rows:
            values: dict[str, Any] = dict(zip(names, row, strict=True))
            yield values["gold"], values["pred"], bool(values.get("expected", values.get("result")))


def content(text: str) -> str | None:
    """What a model would have put into its box: the boxes, or the one piece of mathematics; None for running
    text."""
    if found := boxed_contents(text.replace("\\\\boxed", "\\boxed").replace("\\\\text", "\\text")):
        return found[-1] if len(set(found)) == 1 else "".join(f"\\boxed{{{b}}}" for b in found)
    if match := _ENVIRONMENT.fullmatch(text):
        return next(g for g in match.groups() if g).strip()
    prose = re.search(r"[$]|\\\[|\\\(|[A-Za-z]{3,} [A-Za-z0-9]|:\s", text)
    return text if len(text) < 40 and not prose else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sdist", type=Path)
    rows = list(pairs(parser.parse_args().sdist))
    explanations: dict[str, str] = json.loads(EXPLANATIONS.read_text()) if EXPLANATIONS.exists() else {}
    taken = [(name, content(g), content(p), e) for name, g, p, e in rows]
    graded = [(name, g, p, e) for name, g, p, e in taken if g is not None and p is not None]
    texts = [
        f"<answer>{p}</answer>" if "\\boxed{" in p else f"<answer>\\boxed{{{p}}}</answer>"
        for _, _, p, _ in graded
    ]
    references = [" , ".join(boxed_contents(g)) if "\\boxed{" in g else g for _, g, _, _ in graded]
    with Scorer(config.Rewards(max_timeout_rate=1.0, max_error_rate=1.0)) as scorer:
        outcomes = scorer.score(texts, references, [grader.classify(r) for r in references])
    result: dict[str, Any] = {"pairs": len(rows), "running_text_without_a_box": len(rows) - len(graded)}
    disagreements = []
    for (name, _, p, expected), reference, outcome in zip(graded, references, outcomes, strict=True):
        if (outcome.verdict == "correct") != expected:
            disagreements.append(
                {
                    "test": name,
                    "reference": reference[:120],
                    "answer": p[:120],
                    "they_say": expected,
                    "we_say": outcome.verdict,
                    "why": explanations.get(name, "UNEXPLAINED"),
                }
            )
    result |= {"graded": len(graded), "agree": len(graded) - len(disagreements)}
    result["we_accept_what_they_refuse"] = sum(not d["they_say"] for d in disagreements)
    result["reasons"] = dict(Counter(d["why"].split(":")[0] for d in disagreements).most_common())
    result["disagreements"] = disagreements
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    for d in disagreements:
        print(
            f"{d['test']}  {d['reference']!r} <- {d['answer']!r}: they {d['they_say']}, we {d['we_say']} |"
            f" {d['why']}"
        )
    print({k: v for k, v in result.items() if k != "disagreements"})
    if unexplained := [d["test"] for d in disagreements if d["why"] == "UNEXPLAINED"]:
        raise SystemExit(f"unexplained disagreements: {unexplained}")


if __name__ == "__main__":
    main()
