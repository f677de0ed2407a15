"""Scores on benchmarks in the report: accuracy, its interval, categories, and what the authors published."""

from __future__ import annotations

import html
from typing import Any

from trainer.observe.history import column
from trainer.observe.report_page import html_page
from trainer.observe.scores import PUBLISHED_BY, describe_prompt

WIDTH = 1140
NAME = 250
"""Width of the labels."""
ROW = 24
"""Height of a row."""
FIGURES = 200
"""Width of the figures at the right."""
MOST_CATEGORIES = 40


def scores_page(name: str, found: dict[str, Any]) -> str:
    """The report of an evaluation, from the content of `benchmarks.json`."""
    samples = found["samples"]
    how = f"temperature {found['temperature']:g}"
    if samples == 1 and not found["temperature"]:
        how = "greedy"
    completions = "1 completion" if samples == 1 else f"{samples} completions"
    facts = [found["model"], f"{completions} per problem, {how}"]
    facts.append(describe_prompt(found.get("system_prompt", "rows")))
    if found["judge"]:
        facts.append(f"judged by {found['judge']}")
    head = f"<header><h1>{html.escape(name)}</h1><p>{html.escape(' · '.join(facts))}</p></header>"
    note = "Accuracy; the line is its 95% interval over problems."
    published = column(found["benchmarks"].values(), "published")
    if published:
        model = published[0]["model"]
        note += f" Triangle: published for {model} ({PUBLISHED_BY}), with another prompt and scorer."
    charts = ""
    for benchmark, one in found["benchmarks"].items():
        charts += _chart(benchmark, one)
    return html_page(name, f'{head}<p>{html.escape(note)}</p><section class="charts">{charts}</section>')


def _chart(benchmark: str, one: dict[str, Any]) -> str:
    """One benchmark's bars: the whole, then its categories from the best to the worst."""
    parts = sorted(one.get("categories", {}).items(), key=lambda part: -part[1]["accuracy"])
    rows = [("all", one)]
    for part, figures in parts[:MOST_CATEGORIES]:
        rows.append((part or "(none)", figures))
    height = ROW * (len(rows) + 1)

    def x(share: float) -> float:
        return NAME + share * (WIDTH - NAME - FIGURES)

    shapes = []
    for t in range(5):
        shapes.append(
            f'<path class="grid" d="M{x(t / 4):.1f} 0V{height - ROW}"/>'
            f'<text class="xtick" x="{x(t / 4):.1f}" y="{height - 6}">{25 * t}%</text>'
        )

    for i, (label, figures) in enumerate(rows):
        y = ROW * i
        low, high = figures["interval"]
        value = f"{figures['accuracy']:.1%} of {figures['problems']:,}"
        shapes.append(
            f'<text class="ytick" x="{NAME - 10}" y="{y + 16}">{html.escape(label[:36])}</text>'
            f'<rect class="f{1 if i else 3}" x="{NAME}" y="{y + 5}" '
            f'width="{x(figures["accuracy"]) - NAME:.1f}" height="{ROW - 10}"/>'
            f'<path class="interval" d="M{x(low):.1f} {y + ROW / 2}H{x(high):.1f}"/>'
            f'<text class="value" x="{x(1) + 12}" y="{y + 16}">{value}</text>'
        )
    if "published" in one:
        at = x(one["published"]["accuracy"])
        shapes.append(f'<path class="published" d="M{at:.1f} 6l-5 -6h10z"/>')
    more = ""
    if len(parts) > MOST_CATEGORIES:
        more = f" {len(parts) - MOST_CATEGORIES} more categories in benchmarks.md."
    extra = [f"{key} {one[key]:.1%}" for key in one if "@" in key]
    if "by_published_rules" in one:
        extra.append(f"by the authors' rules {one['by_published_rules']:.1%}")
    if "published" in one:
        extra.append(f"published {one['published']['accuracy']:.1%}")
    note = f"<p>{html.escape(', '.join(extra))}.{more}</p>" if extra or more else ""
    return (
        f'<figure class="chart wide"><figcaption><h3>{html.escape(benchmark)}</h3></figcaption>{note}'
        f'<svg viewBox="0 -4 {WIDTH} {height + 4}" role="img" aria-label="{html.escape(benchmark)}">'
        f"{''.join(shapes)}</svg></figure>"
    )
