"""What a report draws: its curves in order, the bands that are expected of them, where the time of a step
went, and scores on benchmarks."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.config import Expected
from trainer.config.expected import compare_with_bands
from trainer.config.run_folder import SAMPLING
from trainer.observe.charts import Chart, Line, stacked_bars
from trainer.observe.differences import state_of
from trainer.observe.history import column
from trainer.observe.live import format_duration
from trainer.observe.phases import mean_seconds
from trainer.observe.report_page import color_key, html_page, html_table
from trainer.observe.scores import PUBLISHED_BY, describe_prompt

HELD_OUT = Chart(
    "Accuracy",
    (
        Line("reward/accuracy", "training completions", 1),
        Line("eval/accuracy", "held out", 2, dots=True),
    ),
    "Share of correct completions: those sampled for training, and those to held-out questions.",
    percent=True,
    wide=True,
)
CHARTS = (
    Chart(
        "Reward", (Line("reward/mean", "mean", 1), Line("reward/std", "std", 8)), "Before any normalization."
    ),
    Chart(
        "Completion format",
        (Line("reward/format", "well-formed", 3), Line("reward/no_answer_rate", "no answer", 4)),
        "Completions in the form that rewards.answer asks for; no final answer found.",
        percent=True,
    ),
    Chart(
        "KL to the reference", (Line("kl/mean", "nats/token", 5),), "How far the policy has moved.", zero=True
    ),
    Chart("Entropy", (Line("entropy/mean", "nats/token", 6),), "Its collapse ends exploration.", zero=True),
    Chart(
        "Completion length",
        (Line("tokens/response_mean", "mean tokens", 1),),
        "The band spans the shortest and the longest completion of the step.",
        zero=True,
        band=("tokens/response_min", "tokens/response_max"),
    ),
    Chart(
        "Cut short, and groups all alike",
        (
            Line("tokens/truncated_fraction", "completions cut", 2),
            Line("group/zero_std_fraction", "groups without variance", 8),
        ),
        "Completions at the token limit; prompts whose completions all earned the same and teach nothing.",
        percent=True,
    ),
    Chart(
        "Turns",
        (Line("turns/replies_mean", "replies", 1), Line("turns/errors_mean", "wrong calls", 4)),
        "Of an episode, in the mean.",
        zero=True,
    ),
    Chart(
        "Episodes cut short, and tools that fail",
        (
            Line("turns/limit_fraction", "at the limit of turns", 2),
            Line("turns/images_fraction", "at the limit of images", 8),
            Line("turns/failed_fraction", "observations of a failure", 4),
        ),
        percent=True,
        skip_flat=True,
    ),
    Chart(
        "Time in tools",
        (Line("perf/tool_s_max", "s in tools", 1), Line("perf/tool_wait_s_max", "s waited for", 4)),
        "Slow tools of one engine, calls added up, and what the engine waited for them; the largest of each.",
        zero=True,
        skip_flat=True,
    ),
    Chart(
        "Losses",
        (Line("loss/total", "total", 1), Line("loss/policy", "policy", 2)),
        "The policy loss is near 0 by construction where each step is one update.",
    ),
    Chart("Gradient norm", (Line("grad/norm", "before clipping", 4),), log=True),
    Chart(
        "Engine against policy",
        (Line("mismatch/logprob_abs_mean", "mean", 6), Line("mismatch/logprob_abs_max", "max", 4)),
        "Difference of log-probabilities of the sampled tokens, in nats.",
        log=True,
    ),
    Chart(
        "Older weights against the policy",
        (Line("staleness/logprob_abs_mean", "mean", 6), Line("staleness/logprob_abs_max", "max", 4)),
        "The same where older weights sampled the step: what the rollout correction weighs.",
        log=True,
    ),
    Chart(
        "Steps that samples are behind",
        (Line("rollout/staleness_mean", "mean", 6), Line("rollout/staleness_max", "most", 4)),
        "Updates since the weights that sampled the step.",
        zero=True,
    ),
    Chart(
        "Waiting for rollout workers",
        (Line("fleet/wait_s", "s", 8),),
        "Seconds of each step in which the trainer had nothing to learn from.",
        zero=True,
    ),
    Chart(
        "Rollout workers without a unit",
        (Line("fleet/idle_share", "share of their time", 2),),
        "What is paid for and not used: near 0 where the trainer waits, larger where there are too many.",
        percent=True,
    ),
    Chart("Rollout workers alive", (Line("fleet/workers", "workers", 1),), zero=True),
    Chart(
        "Clipping",
        (Line("ratio/clip_fraction", "tokens clipped", 2),),
        "Share of tokens whose surrogate was clipped.",
        percent=True,
    ),
    Chart("Cross-entropy", (Line("sft/loss", "nats/token", 1),), "Of the completion tokens."),
    Chart("Learning rate", (Line("optim/lr", "", 8),), zero=True, skip_flat=True),
    Chart(
        "Grading trouble",
        (Line("reward/timeout_rate", "timeouts", 4), Line("reward/error_rate", "errors", 2)),
        percent=True,
        skip_flat=True,
    ),
    Chart(
        "Rollout speed",
        (Line("perf/rollout_tokens_per_s", "tokens/s", 1),),
        "All engines together.",
        zero=True,
    ),
    Chart(
        "Decode slots",
        (Line("perf/slots_used", "used", 1),),
        "Share that held an unfinished completion while engines decoded.",
        percent=True,
        zero=True,
        skip_flat=True,
    ),
    Chart(
        "Training speed", (Line("perf/train_tokens_per_s", "tokens/s", 3),), "All ranks together.", zero=True
    ),
    Chart(
        "Model FLOPs utilisation",
        (Line("perf/mfu_train", "update", 1), Line("perf/mfu_rollout", "rollout", 2)),
        "Share of the GPUs' peak that the model's own arithmetic takes.",
        percent=True,
    ),
    Chart(
        "Checkpoints",
        (
            Line("perf/checkpoint_save_s", "s to save and upload", 1),
            Line("perf/checkpoint_stall_s", "s held up", 4),
        ),
        "The last save from start to commit, beside training, and what of it held training up.",
        zero=True,
        skip_flat=True,
    ),
    Chart("Peak memory", (Line("perf/peak_memory_gib", "GiB", 8),), "The fullest rank.", zero=True),
)
PHASE_COLORS = {
    "rollout": 1,
    "grade": 2,
    "wait": 8,
    "update": 3,
    "sync": 6,
    "checkpoint": 4,
    "eval": 7,
}


# --- what is expected -----------------------------------------------------------------------------------


def _edge(metric: str, side: str) -> str:
    """Name of a band's edge among the metrics of a step."""
    return f"expected/{side}/{metric}"


def with_edges(history: Sequence[dict[str, Any]], expected: Expected) -> list[dict[str, Any]]:
    """The history with both edges of every band as metrics of its steps, as far as the run has come."""
    records = []
    for record in history:
        edges: dict[str, float] = {}
        for band in expected.bands:
            interval = band.edges(record["step"])
            if interval is not None and all(map(math.isfinite, interval)):
                edges[_edge(band.metric, "low")], edges[_edge(band.metric, "high")] = interval
        records.append(record | edges)
    return records


def chart_with_band(chart: Chart, expected: Expected) -> Chart:
    """The chart with the band of one of its lines, if one has any and the chart has no other."""
    if chart.band:
        return chart
    lines = {line.name: line.label for line in chart.lines}
    for band in expected.bands:
        if band.metric in lines and band.low and band.high:
            what = lines[band.metric]
            note = f"{chart.note} Shaded: what is expected of {what or band.metric}.".strip()
            return replace(chart, note=note, band=(_edge(band.metric, "low"), _edge(band.metric, "high")))
    return chart


def expectation_section(expected: Expected, history: Sequence[dict[str, Any]]) -> str:
    """How the run compares with what was expected of it; empty where nothing was."""
    if not expected.bands:
        return ""
    verdict = compare_with_bands(expected, history)
    rows = []
    for band in expected.bands:
        edges = str(band).removeprefix(band.metric)
        rows.append((band.metric, edges, state_of(band, verdict), band.source))
    promise = f"<p>Not promised: {html.escape(expected.not_promised)}</p>" if expected.not_promised else ""
    table = html_table(("metric", "expected", "this run", "source"), rows)
    title = f"<h2>Expected <small>{html.escape(str(verdict))}</small></h2>"
    return f'{title}<section class="phases">{table}</section>{promise}'


# --- where the time went --------------------------------------------------------------------------------

OTHER = 8
"""Color of the time that no phase covers."""


def phases_section(history: Sequence[Mapping[str, Any]]) -> str:
    """A bar, a chart over steps and a table for each lane; empty where no step was timed."""
    shown = ""
    for lane, means in mean_seconds(history).items():
        if means:
            shown += _lane(history, lane, means)
    if not shown:
        return ""
    return f'<h2>Where the time went</h2><section class="phases">{shown}</section>'


def _lane(history: Sequence[Mapping[str, Any]], lane: str, means: Sequence[tuple[str, float]]) -> str:
    whole = f"time/{SAMPLING}_s" if lane == SAMPLING else "time/step_s"
    timed = [record for record in history if whole in record]
    keys = [(name, PHASE_COLORS.get(name, OTHER)) for name, _ in means]
    rows = []
    for record in timed:
        values: list[float] = []
        for name, _ in means:
            if name == "other":
                values.append(max(record[whole] - sum(values), 0.0))
            else:
                values.append(record.get(f"time/{name}_s", 0.0))
        rows.append((record["step"], values))

    title = f"Seconds per step: {lane}" if lane else "Seconds per step"
    chart = Chart(title, (), "What each step spent its time on.", wide=True)
    total = sum(seconds for _, seconds in means) or 1.0
    bar = ""
    table = []
    for (name, color), (_, seconds) in zip(keys, means, strict=True):
        share = 100 * seconds / total
        bar += f'<i class="b{color}" style="width:{share:.2f}%" title="{html.escape(name)}"></i>'
        whole_run = format_duration(seconds * len(timed))
        table.append((color_key(name, color), f"{share:.1f}%", f"{seconds:.3g} s", whole_run))
    shown = html_table(("phase", "share", "mean per step", "total"), table)
    return f'<div class="bar">{bar}</div>{stacked_bars(chart, rows, keys)}{shown}'


# --- scores on benchmarks -------------------------------------------------------------------------------

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
