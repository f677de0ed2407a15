"""Runs beside each other: where one left what was expected of it, where two part, and a page of several.

    python -m trainer.observe.compare RUN_DIR --expected       # the bands of the run's own recipe
    python -m trainer.observe.compare RUN_DIR RUN_DIR

The exit code is 0 where the run is as expected, or the two are equal, and 1 where not.
"""

from __future__ import annotations

import argparse
import html
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from trainer.config import ConfigError, load
from trainer.config.expected import compare_with_bands
from trainer.config.run_folder import CONFIG
from trainer.observe.charts import CHARTS, HELD_OUT, Chart, Line, format_number, line_chart, series
from trainer.observe.history import column, format_cost, read_cost, read_history, reproducible_part, run_name
from trainer.observe.live import format_duration
from trainer.observe.report_page import color_key, html_page, html_table

SHOWN = 12
"""Metrics that are named where two runs part."""
TIMES = ("time/", "perf/", "cost/")
"""Metrics that differ between equal runs."""
MAX_RUNS = 8
"""Number of colors."""
SUMMARY = (
    ("held-out accuracy", "eval/accuracy"),
    ("reward", "reward/mean"),
    ("loss", "sft/loss"),
    ("KL", "kl/mean"),
    ("entropy", "entropy/mean"),
    ("completion tokens", "tokens/response_mean"),
    ("s/step", "time/step_s"),
    ("slots used", "perf/slots_used"),
    ("rollout tokens/s", "perf/rollout_tokens_per_s"),
)
"""(column, metric). `time/` and `perf/` show the median, others the first and the last value."""


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Metrics per step, in order of steps. Raises ConfigError where there are none."""
    history = read_history(folder)
    if not history:
        raise ConfigError(
            f"no metrics in {folder}: give the directory of a run that has made at least one step; an"
            " evaluation's table is its benchmarks.md"
        )
    return history


# --- for a terminal -------------------------------------------------------------------------------------


def against_bands(folder: Path) -> int:
    """Prints where the run left its bands, first step first; `cost/usd` is what the desk counted so far.
    Returns the exit code."""
    expected = load(folder / CONFIG).expected
    if not expected.bands:
        raise ConfigError(f"nothing is expected of {run_name(folder)}: its recipe has no bands")
    history = metrics_of(folder)
    if dollars := read_cost(folder).get("usd"):
        history[-1] |= {"cost/usd": dollars}
    verdict = compare_with_bands(expected, history)
    print(f"{run_name(folder)}: {verdict}")
    for departure in verdict.departures[1:]:
        print(f"  then {departure}")
    width = max(len(band.metric) for band in expected.bands)
    for band in expected.bands:
        print(f"  {band.metric:<{width}}  {verdict.state_of(band)}  ({band.source})")
    if expected.not_promised:
        print(f"  not promised: {expected.not_promised}")
    return 1 if verdict.departures else 0


def against_run(first: Path, second: Path) -> int:
    """Prints the first step at which two runs differ, and in what. Returns the exit code. Times and speeds
    are left out: equal runs have different ones."""
    ours, theirs = ({record["step"]: record for record in metrics_of(run)} for run in (first, second))
    names = f"{run_name(first)} and {run_name(second)}"
    both = sorted(ours.keys() & theirs.keys())
    for step in both:
        differing = _differing(ours[step], theirs[step])
        if not differing:
            continue
        print(f"{names} part at step {step}, in {len(differing)} metrics:")
        print("\n".join(differing[:SHOWN]))
        if len(differing) > SHOWN:
            print(f"  and {len(differing) - SHOWN} more")
        return 1
    if not both:
        print(f"{names} have no step in common")
        return 1
    print(f"{names} are equal in all {len(both)} steps that both have metrics of, up to step {both[-1]}")
    return 0


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """A line for each metric that is not the same to the last bit, with both values."""
    left, right = reproducible_part(ours), reproducible_part(theirs)
    lines = []
    for name in sorted(left.keys() | right.keys()):
        a, b = left.get(name), right.get(name)
        both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
        if a != b and not both_nan and not name.startswith(TIMES):
            values = ("absent" if value is None else repr(value) for value in (a, b))
            lines.append(f"  {name}: {' and '.join(values)}")
    return lines


# --- a page ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison."""

    name: str
    folder: Path
    history: list[dict[str, Any]]
    config: dict[str, Any]
    """Flat: {"optimizer.learning_rate": 1e-6, ...}."""


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """Writes a page of several runs to `out`: their curves in one drawing, what they reached and cost, how
    their settings differ. Raises ConfigError for too many runs, or one without a step."""
    if len(folders) > MAX_RUNS:
        raise ConfigError(f"{len(folders)} runs in one report: give at most {MAX_RUNS}")
    runs = []
    for i, folder in enumerate(folders, 1):
        names = list(map(run_name, folders))
        name = names[i - 1] if len(set(names)) == len(names) else f"{names[i - 1]} ({i})"
        try:
            config = yaml.safe_load((folder / CONFIG).read_text())
        except (OSError, ValueError, yaml.YAMLError, RecursionError):  # none, or not a run's
            config = None
        flat = dict(_flat(config if isinstance(config, dict) else {}))
        runs.append(ComparedRun(name, folder, metrics_of(folder), flat))
    charts = ""
    for chart in (HELD_OUT, *CHARTS):
        charts += _overlay(chart, runs)
    now = html.escape(time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime()))
    body = (
        f"<header><h1>{len(runs)} runs</h1><p>{now}</p>"
        f'</header>{_summary(runs)}<section class="charts">{charts}</section>{_settings(runs)}'
    )
    out.write_text(html_page(" against ".join(run.name for run in runs), body), encoding="utf-8")
    return out


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in values.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return pairs


def _overlay(chart: Chart, runs: Sequence[ComparedRun]) -> str:
    """One drawing per metric of a chart, with a curve per run."""
    drawn = ""
    for line in chart.lines:
        merged: dict[int, dict[str, Any]] = {}
        curves = []
        for i, run in enumerate(runs):
            curves.append(Line(f"run {i}", run.name, i + 1, line.dots))
            for step, value in series(run.history, line.name):
                merged.setdefault(int(step), {"step": int(step)})[f"run {i}"] = value
        title = f"{chart.title}: {line.label}" if line.label and len(chart.lines) > 1 else chart.title
        of_metric = replace(chart, title=title, lines=tuple(curves), band=None, wide=False)
        drawn += line_chart(of_metric, [merged[step] for step in sorted(merged)])
    return drawn


def _summary(runs: Sequence[ComparedRun]) -> str:
    columns = []
    for title, name in SUMMARY:
        if any(column(run.history, name) for run in runs):
            columns.append((title, name))
    rows = []
    for i, run in enumerate(runs, 1):
        stamps = column(run.history, "time/unix_s")
        took = format_duration(stamps[-1] - stamps[0]) if stamps else "–"
        cells = [_reached(column(run.history, name), name) for _, name in columns]
        steps = f"{run.history[-1]['step']:,}"
        rows.append((color_key(run.name, i), steps, took, *cells, format_cost(run.folder)))
    titles = ("run", "steps", "time", *(title for title, _ in columns), "cost")
    return f'<section class="phases">{html_table(titles, rows, "wide")}</section>'


def _reached(values: Sequence[float], name: str) -> str:
    if not values:
        return "–"
    if name.startswith(("time/", "perf/")):
        return format_number(sorted(values)[len(values) // 2])
    first, last = (format_number(value, name.startswith("eval/")) for value in (values[0], values[-1]))
    return f"{first} → {last}"


def _settings(runs: Sequence[ComparedRun]) -> str:
    """A table of the settings that differ."""
    keys: dict[str, Any] = {}
    for run in runs:
        keys |= run.config
    rows = []
    for key in keys:
        values = [run.config.get(key, "–") for run in runs]
        if len(set(map(repr, values))) > 1 and not key.startswith("run.dir"):
            rows.append((key, *map(str, values)))
    if not rows:
        return "<h2>Configuration</h2><p>The configurations are the same.</p>"
    table = html_table(["", *(run.name for run in runs)], rows)
    differ = f"{len(rows)} fields differ, {len(keys) - len(rows)} are the same"
    return f'<h2>Configuration <small>{differ}</small></h2><section class="phases">{table}</section>'


def main(argv: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m trainer.observe.compare", description=__doc__, formatter_class=form
    )
    parser.add_argument("runs", type=Path, nargs="+", help="one run with --expected, or two")
    parser.add_argument("--expected", action="store_true")
    args = parser.parse_args(argv)
    try:
        if len(args.runs) != (1 if args.expected else 2):
            raise ConfigError("give one run with --expected, or two runs")
        return against_bands(*args.runs) if args.expected else against_run(*args.runs)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
