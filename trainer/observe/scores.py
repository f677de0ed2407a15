"""Scores of benchmarks from graded completions: pass@k, majority vote, confidence intervals, per category. It
is plain arithmetic on the lines of `pass_rates.jsonl`; trainer/loops/pass_rate.py samples the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from trainer.observe.history import column

Z = 1.959964
"""Standard errors on each side of an interval of 95%."""
ASKED_A_MODEL = ("mathvista", "mathverse")
"""Benchmarks whose published figures come from a judge model. Ours, by rules alone, are not comparable."""

PASS_AT = (1, 2, 4, 8, 16, 32, 64, 128)
"""The k of pass@k, as far as there are that many completions."""

PUBLISHED = {
    "Qwen/Qwen2.5-VL-3B-Instruct": {"mathvista": 0.623, "mathvision": 0.212},
    "Qwen/Qwen2.5-VL-7B-Instruct": {"mathvista": 0.682, "mathvision": 0.251},
    "Qwen/Qwen2.5-VL-72B-Instruct": {"mathvista": 0.748, "mathvision": 0.381},
}
"""Accuracy by the model's authors: what a base model should come near to, and a trained one be held
against."""
PROMPTS = {"published": "the benchmark's prompt", "none": "no system message"}
"""System prompts in a few words."""


@dataclass(frozen=True)
class ScoredProblem:
    """One problem with its completions."""

    source: str
    """`benchmark/category`, or `benchmark`."""
    answers: Sequence[tuple[str | None, float]]
    """Boxed answer and accuracy of each completion; a prompt that was too long for the engine has none
    right."""
    tokens: int = 0
    """Tokens of all completions."""
    truncated: int = 0
    """Number of completions that were cut at the longest length."""
    asked: bool = True
    """Whether it was asked; its prompt may be too long."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that one of k completions drawn from these n is correct, unbiased (arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_accuracy(answers: Sequence[tuple[str | None, float]]) -> float:
    """Accuracy of the most frequent answer; the mean over answers that share the first place. Answers of
    equal value are spelled alike (`Scorer.by_value`)."""
    votes = Counter(answer for answer, _ in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    accuracy = dict(reversed(answers))
    first = [accuracy[answer] for answer, count in votes.items() if count == most]
    return sum(first) / len(first)


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean over problems: Wilson's where each is right or wrong. Where problems have
    means of several completions, one problem that is always right and one that is always wrong are added, so
    that means that agree by chance leave an interval; then Student's t. tests/observe/test_intervals.py has
    the coverage."""
    n = len(values)
    mean = sum(values) / n
    if set(values) <= {0.0, 1.0}:
        middle = mean + Z**2 / (2 * n)
        scale = 1 + Z**2 / n
        half = Z * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n * n))
        return (max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))
    values = [*values, 0.0, 1.0]
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / len(values)
    # Cornish and Fisher's first term, n + 1 degrees of freedom
    student = Z * (1 + (Z**2 + 1) / (4 * (n + 1)))
    half = student * math.sqrt(variance / len(values))
    return (max(0.0, mean - half), min(1.0, mean + half))


def score_problems(rows: Sequence[ScoredProblem]) -> dict[str, Any]:
    """Figures of problems with equally many completions each."""
    n = len(rows[0].answers)
    scored = [row for row in rows if row.asked]
    completions = max(1, n * len(scored))
    accuracies = [sum(accuracy for _, accuracy in row.answers) / n for row in rows]
    earned = [accuracy for row in rows for _, accuracy in row.answers]
    unanswered = sum(answer is None for row in scored for answer, _ in row.answers)
    figures: dict[str, Any] = {
        "problems": len(rows),
        "too_long": len(rows) - len(scored),
        "accuracy": sum(earned) / len(earned),
        "interval": confidence_interval(accuracies),
        "no_answer": unanswered / completions,
        "truncated": sum(row.truncated for row in rows) / completions,
        "tokens": sum(row.tokens for row in rows) / completions,
    }
    if n > 1:
        correct = [sum(accuracy > 0 for _, accuracy in row.answers) for row in rows]
        for k in (*PASS_AT, n):
            if k <= n:
                figures[f"pass@{k}"] = sum(pass_at_k(n, c, k) for c in correct) / len(rows)
        figures[f"maj@{n}"] = sum(majority_accuracy(row.answers) for row in rows) / len(rows)
    return figures


def score_benchmarks(rows: Sequence[ScoredProblem], base: str = "") -> dict[str, dict[str, Any]]:
    """Benchmark -> its figures. `categories` holds the figures of its parts, if it has several. `published`
    holds what the authors of `base`, the hub id of the model that is evaluated or was trained, say."""
    by_benchmark: dict[str, dict[str, list[ScoredProblem]]] = {}
    for row in rows:
        name, _, part = row.source.partition("/")
        by_benchmark.setdefault(name, {}).setdefault(part, []).append(row)
    figures = {}
    for name, parts in by_benchmark.items():
        figures[name] = score_problems(list(chain.from_iterable(parts.values())))
        if len(parts) > 1:
            figures[name]["categories"] = {part: score_problems(parts[part]) for part in sorted(parts)}
        if name in PUBLISHED.get(base, {}):
            figures[name]["published"] = {"model": base, "accuracy": PUBLISHED[base][name]}
    return figures


def scores_table(by_benchmark: dict[str, dict[str, Any]], judge: str, system_prompt: str = "rows") -> str:
    """The scores as a Markdown table. judge: the model that graded free text; empty: rules alone.
    system_prompt: what was asked with."""
    benchmarks = list(by_benchmark.values())
    columns = [key for key in benchmarks[0] if "@" in key]
    published = column(benchmarks, "published")
    head = ["benchmark", "problems", "accuracy", "95%"]
    if published:
        head.append(f"published ({published[0]['model']})")
    head += [*columns, "no answer", "cut", "too long", "tokens", "by"]

    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, figures in by_benchmark.items():
        graded_by = f"judge {judge}" if judge else "rules"
        if system_prompt != "rows":
            graded_by += f", {PROMPTS.get(system_prompt, 'a prompt of its own')}"
        if not judge and name in ASKED_A_MODEL:
            graded_by += " (published: a judge)"
        parts = [(name, figures, graded_by)]
        for part, of_part in figures.get("categories", {}).items():
            parts.append((f"- {part or '(none)'}", of_part, ""))
        for label, score, by in parts:
            low, high = score["interval"]
            cells = [label, score["problems"], f"{score['accuracy']:.1%}", f"{low:.1%} to {high:.1%}"]
            if published:
                cells.append(f"{score['published']['accuracy']:.1%}" if "published" in score else "")
            cells += [f"{score[figure]:.1%}" for figure in (*columns, "no_answer", "truncated")]
            cells += [score["too_long"], f"{score['tokens']:.0f}", by]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
