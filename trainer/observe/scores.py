"""From graded completions of benchmarks to their scores: pass@k, majority vote, confidence intervals, per
category.

Plain arithmetic on the lines of `pass_rates.jsonl`; the code that asks the model is
trainer/loops/pass_rate.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Z = 1.959964
"""Of a two-sided interval of 95%."""
ASKED_A_MODEL = ("mathvista", "mathverse")
"""Benchmarks whose published figures come from a judge model: ours by rules alone is another figure."""


PUBLISHED = {
    "Qwen/Qwen2.5-VL-3B-Instruct": {"mathvista": 0.623, "mathvision": 0.212},
    "Qwen/Qwen2.5-VL-7B-Instruct": {"mathvista": 0.682, "mathvision": 0.251},
    "Qwen/Qwen2.5-VL-72B-Instruct": {"mathvista": 0.748, "mathvision": 0.381},
}
"""Accuracy by the model's authors: what a base model should come near to, and a trained one be held
against."""
PUBLISHED_BY = "Qwen2.5-VL's README"


@dataclass(frozen=True)
class Row:
    """One problem with its completions."""

    source: str
    """`benchmark/category`, or `benchmark`."""
    answers: Sequence[tuple[str | None, float]]
    """Boxed answer and accuracy of each completion; a prompt that was too long for the engine has none
    right."""
    tokens: int = 0
    """Of all completions."""
    truncated: int = 0
    """Completions cut at their longest."""
    asked: bool = True
    """False: its prompt was too long."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that one of k completions drawn from these n is correct, unbiased (arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(answers: Sequence[tuple[str | None, float]]) -> float:
    """Accuracy of the most frequent answer, as it is spelled; the mean over answers that share the first
    place."""
    votes = Counter(answer for answer, _ in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    accuracy = dict(reversed(answers))
    first = [accuracy[answer] for answer, count in votes.items() if count == most]
    return sum(first) / len(first)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean over problems: Wilson's where each is 0 or 1, else by their standard error."""
    n, mean = len(values), sum(values) / len(values)
    if all(v in (0.0, 1.0) for v in values):
        middle, scale = (mean + Z**2 / (2 * n)), 1 + Z**2 / n
        half = Z * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n * n))
        return (max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, n - 1) / n)
    return (max(0.0, mean - Z * spread), min(1.0, mean + Z * spread))


def score(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of problems with equally many completions each."""
    n = len(rows[0].answers)
    correct = [sum(accuracy > 0 for _, accuracy in row.answers) for row in rows]
    asked = max(1, n * sum(row.asked for row in rows))
    powers = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < n]
    found: dict[str, Any] = {
        "problems": len(rows),
        "too_long": sum(not row.asked for row in rows),
        "accuracy": sum(accuracy for row in rows for _, accuracy in row.answers) / (n * len(rows)),
        "interval": interval([sum(a for _, a in row.answers) / n for row in rows]),
        "no_answer": sum(a is None for row in rows if row.asked for a, _ in row.answers) / asked,
        "truncated": sum(row.truncated for row in rows) / asked,
        "tokens": sum(row.tokens for row in rows) / asked,
    }
    for k in [*powers, n] if n > 1 else []:
        found[f"pass@{k}"] = sum(pass_at_k(n, c, k) for c in correct) / len(rows)
    if n > 1:
        found[f"maj@{n}"] = sum(majority(row.answers) for row in rows) / len(rows)
    return found


def scores(rows: Sequence[Row], base: str = "") -> dict[str, dict[str, Any]]:
    """By benchmark: its figures, under `categories` those of its parts where it has several, and under
    `published` what the authors of `base` say. base: hub id of the model that is evaluated or was trained."""
    found = {}
    for name in dict.fromkeys(row.source.partition("/")[0] for row in rows):
        own = [row for row in rows if row.source.partition("/")[0] == name]
        parts = sorted({row.source.partition("/")[2] for row in own})
        by_part = {
            part: score([row for row in own if row.source.partition("/")[2] == part]) for part in parts
        }
        found[name] = score(own) | ({"categories": by_part} if len(parts) > 1 else {})
        if name in PUBLISHED.get(base, {}):
            found[name]["published"] = {"model": base, "accuracy": PUBLISHED[base][name]}
    return found


def table(found: dict[str, dict[str, Any]], judge: str) -> str:
    """Markdown. judge: the model that decided free text; empty: rules alone."""
    columns = [key for key in next(iter(found.values())) if "@" in key]
    published = [f"published ({one['published']['model']})" for one in found.values() if "published" in one][
        :1
    ]
    head = ["benchmark", "problems", "accuracy", "95%", *published, *columns, "no answer", "cut", "too long", "tokens",
            "by"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, figures in found.items():
        by = f"judge {judge}" if judge else "rules" + " (published: a judge)" * (name in ASKED_A_MODEL)
        parts = [(name, figures, by)]
        parts += [(f"- {part or '(none)'}", one, "") for part, one in figures.get("categories", {}).items()]
        for label, one, how in parts:
            low, high = one["interval"]
            shares = [f"{one[column]:.1%}" for column in (*columns, "no_answer", "truncated")]
            theirs = [f"{one['published']['accuracy']:.1%}" if "published" in one else ""] * len(published)
            cells = [label, one["problems"], f"{one['accuracy']:.1%}", f"{low:.1%} to {high:.1%}", *theirs, *shares,
                     one["too_long"], f"{one['tokens']:.0f}", how]  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
