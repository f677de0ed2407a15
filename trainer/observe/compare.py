"""Several runs in one report: their curves in one drawing, what they reached and cost, how their
settings differ."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from trainer.config import ConfigError
from trainer.config.run_folder import CONFIG
from trainer.observe.charts import Line, format_number, line_chart, series
from trainer.observe.history import column, read_history
from trainer.observe.live import format_duration
from trainer.observe.report_charts import CHARTS, HELD_OUT
from trainer.observe.report_page import color_key, format_cost, html_page, html_table, run_name, wide_table

MAX_RUNS = 8
"""Number of colors."""
SUMMARY = (
    ("held-out accuracy", "eval/accuracy", True),
    ("reward", "reward/mean", False),
    ("loss", "sft/loss", False),
    ("KL", "kl/mean", False),
    ("entropy", "entropy/mean", False),
    ("completion tokens", "tokens/response_mean", False),
    ("s/step", "time/step_s", False),
    ("slots used", "perf/slots_used", False),
    ("rollout tokens/s", "perf/rollout_tokens_per_s", False),
)
"""(column, metric, percent). `time/` and `perf/` show the median, others the first and the last value."""


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison."""

    name: str
    folder: Path
    history: list[dict[str, Any]]
    config: dict[str, Any]
    """Flat: {"optimizer.learning_rate": 1e-6, ...}."""


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """Writes the page to `out`. Raises ConfigError for too many runs, or one without a step."""
    if len(folders) > MAX_RUNS:
        raise ConfigError(f"{len(folders)} runs in one report: give at most {MAX_RUNS}")
    runs = list(map(_read, folders))
    if len({run.name for run in runs}) < len(runs):
        for i, run in enumerate(runs):
            runs[i] = replace(run, name=f"{run.name} ({i + 1})")
    charts = ""
    for chart in (HELD_OUT, *CHARTS):
        charts += overlay(chart, runs)
    now = html.escape(time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime()))
    body = (
        f"<header><h1>{len(runs)} runs</h1><p>{now}</p>"
        f'</header>{_summary(runs)}<section class="charts">{charts}</section>{_differences(runs)}'
    )
    out.write_text(html_page(" against ".join(run.name for run in runs), body), encoding="utf-8")
    return out


def _read(folder: Path) -> ComparedRun:
    history = read_history(folder)
    if not history:
        raise ConfigError(
            f"no metrics in {folder}: give the directory of a run that has made at least one step"
        )
    try:
        config = yaml.safe_load((folder / CONFIG).read_text())
    except (OSError, ValueError, yaml.YAMLError, RecursionError):  # none, or not a run's
        config = None
    return ComparedRun(
        run_name(folder), folder, history, dict(_flat(config if isinstance(config, dict) else {}))
    )


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in values.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return pairs


def overlay(chart: Any, runs: Sequence[ComparedRun]) -> str:
    """One drawing per metric of a chart, with a curve per run."""
    drawn = []
    for line in chart.lines:
        merged: dict[int, dict[str, Any]] = {}
        curves = []
        for i, run in enumerate(runs):
            curves.append(Line(f"run {i}", run.name, i + 1, line.dots))
            for step, value in series(run.history, line.name):
                merged.setdefault(int(step), {"step": int(step)})[f"run {i}"] = value
        title = f"{chart.title}: {line.label}" if line.label and len(chart.lines) > 1 else chart.title
        of_metric = replace(chart, title=title, lines=tuple(curves), band=None, wide=False)
        drawn.append(line_chart(of_metric, [merged[step] for step in sorted(merged)]))
    return "".join(drawn)


def _summary(runs: Sequence[ComparedRun]) -> str:
    titles = ["run", "steps", "time"]
    columns = []
    for title, name, percent in SUMMARY:
        if any(column(run.history, name) for run in runs):
            titles.append(title)
            columns.append((name, percent))

    rows = []
    for i, run in enumerate(runs, 1):
        stamps = series(run.history, "time/unix_s")
        took = format_duration(stamps[-1][1] - stamps[0][1]) if stamps else "–"
        cells = [f"{run.history[-1]['step']:,}", took]
        for name, percent in columns:
            cells.append(_reached(run, name, percent))
        rows.append((color_key(run.name, i), *cells, format_cost(run.folder)))
    return f'<section class="phases">{wide_table([*titles, "cost"], rows)}</section>'


def _reached(run: ComparedRun, name: str, percent: bool) -> str:
    values = column(run.history, name)
    if not values:
        return "–"
    if name.startswith(("time/", "perf/")):
        return format_number(sorted(values)[len(values) // 2])
    return f"{format_number(values[0], percent)} → {format_number(values[-1], percent)}"


def _differences(runs: Sequence[ComparedRun]) -> str:
    keys: dict[str, Any] = {}
    for run in runs:
        keys |= run.config
    shown = []
    for key in keys:
        values = {repr(run.config.get(key, "–")) for run in runs}
        if len(values) > 1 and not key.startswith("run.dir"):
            shown.append(key)
    if not shown:
        return "<h2>Configuration</h2><p>The configurations are the same.</p>"
    rows = [(key, *(str(run.config.get(key, "–")) for run in runs)) for key in shown]
    table = html_table(["", *(run.name for run in runs)], rows)
    same = len(keys) - len(shown)
    return (
        f"<h2>Configuration <small>{len(shown)} fields differ, {same} are the same</small></h2>"
        f'<section class="phases">{table}</section>'
    )
