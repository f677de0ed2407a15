"""The report of a run: one self-contained HTML page, `python -m trainer.observe.report RUN_DIR`. compare.py:
several.

Curves, phase times, samples with their images, the resolved configuration. The page loads nothing (its own
content policy forbids it), and its size is bounded: curves are thinned, samples are chosen, images are
inlined.
"""

from __future__ import annotations

import argparse
import html
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer import config as configuration
from trainer.config import ConfigError, Expected, RunConfig
from trainer.config.expected import compare_with_bands
from trainer.config.run_folder import (
    ATTEMPTS,
    CONFIG,
    LAUNCH_LOG,
    MOST_S,
    NODES,
    REPORT,
    ROSTER,
    SAMPLING,
    file_tail,
    read_lines,
    read_progress,
    read_roster,
)
from trainer.config.run_store import model_name
from trainer.observe import compare, guards
from trainer.observe.charts import CHARTS, HELD_OUT, Chart, Line, format_number, line_chart, stacked_bars
from trainer.observe.history import column, read_cost, run_name
from trainer.observe.live import format_duration
from trainer.observe.phases import mean_seconds
from trainer.observe.report_page import (
    color_key,
    html_page,
    html_table,
    nodes_section,
    readable,
    samples_section,
    table_cells,
    workers_section,
)
from trainer.system.exit_codes import MEANINGS
from trainer.system.terminal_text import terminal_line

WARNING = "warning: "
MOST_WARNINGS = 8
"""Warnings of the log that the page repeats, the newest."""
STOOD_STILL = 1e-6
"""A reward whose values differ by less has not moved."""
OTHER = 8
PHASE_COLORS = {"rollout": 1, "grade": 2, "wait": 8, "update": 3, "sync": 6, "checkpoint": 4, "eval": 7}
"""Colors of the phases; time that none of them covers has OTHER."""


def last_line(run_dir: str | Path) -> str:
    """Writes the report of a run that has ended, and says where it is, or why there is none: all that was
    paid for is kept by then, and a failed end would start the run again."""
    try:
        return f"report: {write_report(run_dir)}"
    except Exception as error:
        again = f"python3 launch.py report {run_dir}"
        return f"warning: the report was not written ({type(error).__name__}: {error}); `{again}` tries again"


def write_report(run_dir: str | Path) -> Path:
    """Writes `report.html` into the run directory and returns its path. Raises ConfigError where there is no
    run."""
    run_dir = Path(run_dir)
    history = compare.metrics_of(run_dir)
    attempts = []
    for line in read_lines(run_dir / ATTEMPTS):
        at, step = line.get("unix_s"), line.get("resume_step")
        if isinstance(at, int | float) and 0 <= at < MOST_S and type(step) is int:  # else no trainer wrote it
            attempts.append(line)
    marks = [a["resume_step"] for a in attempts if a["resume_step"] > 0]
    progress = read_progress(run_dir)
    config, config_html = _config(run_dir / CONFIG)
    name = config.run_id if config else run_name(run_dir)
    expected = config.expected if config else Expected()
    drawn = _with_edges(history, expected)
    hero = replace(HELD_OUT, note=HELD_OUT.note + " Dotted: the run was resumed here.") if marks else HELD_OUT
    charts = ""
    for chart in (_with_band(hero, expected), _by_source(history), *CHARTS):
        charts += line_chart(_with_band(chart, expected), drawn, marks)
    cost = read_cost(run_dir)
    learned = not _stood_still(history)
    sections = [
        _header(name, config, progress, history, attempts, learned),
        _problems(run_dir, config, progress, history, learned),
        _tiles(history, progress, attempts, cost),
        _expectation(expected, history),
        f'<section class="charts">{charts}</section>',
        phases_section(history),
        readable(NODES, lambda: nodes_section(read_lines(run_dir / NODES))),
        readable(ROSTER, lambda: workers_section(read_roster(run_dir))),
        samples_section(run_dir),
        config_html,
        _attempts(attempts),
    ]
    path = run_dir / REPORT
    path.write_text(html_page(name, "".join(sections)), encoding="utf-8")
    return path


# --- top ------------------------------------------------------------------------------------------------


def _header(
    name: str,
    config: RunConfig | None,
    progress: dict[str, Any],
    history: Sequence[dict[str, Any]],
    attempts: Sequence[dict[str, Any]],
    learned: bool,
) -> str:
    status = progress.get("status", "unknown")
    kind = status
    if status == "finished" and not learned:
        status, kind = "finished, nothing learned", "interrupted"
    facts = []
    if config:
        facts = [config.run.name] if config.run.name != name else []
        facts.append(f"{config.method.upper()} of {model_name(config.model.path)}")
        where = "GPU" if config.placement.device == "cuda" else "CPU rank"
        world = config.placement.world_size
        facts.append(f"{world} {where}{'s' if world > 1 else ''}")
    began = attempts[0]["unix_s"] if attempts else history[0].get("time/unix_s", 0)
    if began:
        facts.append(time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime(began)))
    return (
        f"<header><h1>{html.escape(name)}"
        f'<span class="chip {html.escape(kind)}">{html.escape(status)}</span></h1>'
        f"<p>{html.escape(' · '.join(facts))}</p></header>"
    )


def _stood_still(history: Sequence[dict[str, Any]]) -> bool:
    """Whether nothing can have been learned: one reward in all steps, or none that differed within a
    group."""
    rewards = column(history, "reward/mean")
    flat = column(history, "group/zero_std_fraction")
    if len(rewards) < 2 or column(history, "teacher/kl"):
        return False
    return max(rewards) - min(rewards) < STOOD_STILL or (len(flat) > 1 and min(flat) >= 1.0)


def _problems(
    run_dir: Path,
    config: RunConfig | None,
    progress: dict[str, Any],
    history: Sequence[dict[str, Any]],
    learned: bool,
) -> str:
    """What went wrong: why the run ended, that it learned nothing, its guards with step and remedy, and the
    warnings of its log; "" where nothing did."""
    problems = []
    why = progress.get("why") or progress.get("message", "")
    if why and progress.get("status") != "finished":
        code = progress.get("code")
        problems.append((f"It ended with exit code {code}" if code in MEANINGS else "It ended", why, ""))
    if not learned:
        rewards = column(history, "reward/mean")
        still = f"the reward was {format_number(rewards[-1])} in every step"
        if max(rewards) - min(rewards) >= STOOD_STILL:
            still = "in no step had a prompt completions of different rewards"
        problems.append(("Nothing was learned", still, ""))
    for alarm, last in guards.troubles_of(config, history) if config else []:
        until = f" to {last:,}" if last != alarm.step else ""
        what = f"Step {alarm.step:,}{until} (guard {alarm.guard})"
        problems.append((what, alarm.finding, guards.REMEDIES[alarm.guard]))
    problems += [("Warning", warning, "") for warning in _warnings(run_dir / LAUNCH_LOG)]
    items = ""
    for what, finding, remedy in problems:
        sentence = html.escape(terminal_line(finding).rstrip("."))
        items += f"<li><b>{html.escape(what)}:</b> {sentence}. <i>{html.escape(remedy)}</i></li>"
    section = f'<section class="problems"><h2>What went wrong</h2><ul>{items}</ul></section>'
    return section if items else ""


def _warnings(log: Path) -> list[str]:
    """The newest warnings of the run's log that are no guard's, each once."""
    warnings: dict[str, None] = {}
    for line in file_tail(log).decode(errors="replace").splitlines() if log.is_file() else ():
        if line.startswith(WARNING) and "(guard " not in line:
            warnings[line.removeprefix(WARNING)] = None
    return list(warnings)[-MOST_WARNINGS:]


def _tiles(
    history: Sequence[dict[str, Any]],
    progress: dict[str, Any],
    attempts: Sequence[dict[str, Any]],
    cost: dict[str, Any],
) -> str:
    tiles = []
    held_out = column(history, "eval/accuracy")
    if held_out:
        first, last = held_out[0], held_out[-1]
        change = f"{100 * (last - first):+.1f} points, from {format_number(first, True)}"
        tiles.append(("held-out accuracy", f"{100 * last:.1f}%", change if len(held_out) > 1 else ""))
    for title, name, form in (
        ("reward", "reward/mean", "{:.3f}"),
        ("loss", "sft/loss", "{:.4f}"),
        ("KL to the reference", "kl/mean", "{:.2g}"),
    ):
        values = column(history, name)
        if values:
            window = max(1, min(10, len(values) // 4))
            early, late = (form.format(sum(part) / window) for part in (values[:window], values[-window:]))
            of = "last step" if window == 1 else f"mean of the last {window} steps"
            tiles.append((title, late, f"{of}, from {early}" if len(values) > 1 else ""))
    total = progress.get("total_steps") or 0
    last_step = history[-1]["step"]
    tiles.append(("steps", f"{last_step:,}", f"of {total:,}" if total and total != last_step else ""))
    steps = column(history, "time/step_s")
    stamps = column(history, "time/unix_s")
    if stamps:
        began = min(attempts[0]["unix_s"], stamps[0]) if attempts else stamps[0]
        note = f"{format_duration(sum(steps))} in steps" if steps else ""
        note = f"{cost['planned_hours']:.1f} h planned" if cost.get("planned_hours") else note
        tiles.append(("wall clock", format_duration(stamps[-1] - began), note))
    if steps:
        tiles.append(("seconds per step", f"{sorted(steps)[len(steps) // 2]:.2f}", "median"))
    speed = column(history, "perf/rollout_tokens_per_s")
    if speed:
        tiles.append(("rollout", f"{sorted(speed)[len(speed) // 2]:,.0f}", "tokens/s, median"))
    if cost.get("usd"):
        planned = f"${cost['planned_usd']:,.2f} planned" if cost.get("planned_usd") else "at most"
        tiles.append(("cost", f"${cost['usd']:,.2f}", planned))
    if len(attempts) > 1:
        tiles.append(("resumed", f"{len(attempts) - 1}×", f"last after step {attempts[-1]['resume_step']:,}"))
    cells = ""
    for title, value, note in tiles:
        cells += f'<div class="tile"><span>{html.escape(title)}</span>'
        cells += f"<b>{html.escape(value)}</b><small>{html.escape(note)}</small></div>"
    columns = min((6, 5, 4, 3), key=lambda c: (-len(tiles) % c, -c)) if len(tiles) > 2 else len(tiles)
    cells += '<div class="tile filler"></div>' * (-len(tiles) % columns)
    return f'<section class="tiles" style="--columns:{columns}">{cells}</section>'


# --- curves, and what is expected of them ---------------------------------------------------------------


def _by_source(history: Sequence[dict[str, Any]]) -> Chart:
    """Held-out accuracy of every source, where the data has several; the first eight by name."""
    names = sorted({name for record in history for name in record if name.startswith("eval/accuracy_")})
    lines = []
    for color, name in enumerate(names[:8], 1):
        lines.append(Line(name, name.removeprefix("eval/accuracy_"), color, dots=True))
    more = f" The first 8 of {len(names)}." if len(names) > 8 else ""
    note = f"Sources of the held-out rows.{more}"
    return Chart("Held-out accuracy by source", tuple(lines), note, percent=True, wide=True)


def _with_edges(history: Sequence[dict[str, Any]], expected: Expected) -> list[dict[str, Any]]:
    """The history with both edges of every band as metrics of its steps, as far as the run has come."""
    records = []
    for record in history:
        edges: dict[str, float] = {}
        for band in expected.bands:
            interval = band.edges(record["step"])
            if interval is not None and all(map(math.isfinite, interval)):
                edges |= zip(_edges(band.metric), interval, strict=True)
        records.append(record | edges)
    return records


def _edges(metric: str) -> tuple[str, str]:
    """Names of a band's edges among the metrics of a step."""
    return f"expected/low/{metric}", f"expected/high/{metric}"


def _with_band(chart: Chart, expected: Expected) -> Chart:
    """The chart with the band of one of its lines, if one has any and the chart has no other."""
    lines = {line.name: line.label for line in chart.lines}
    for band in expected.bands if not chart.band else ():
        if band.metric in lines and band.low and band.high:
            note = f"{chart.note} Shaded: what is expected of {lines[band.metric] or band.metric}.".strip()
            return replace(chart, note=note, band=_edges(band.metric))
    return chart


def _expectation(expected: Expected, history: Sequence[dict[str, Any]]) -> str:
    """How the run compares with what was expected of it; empty where nothing was."""
    if not expected.bands:
        return ""
    verdict = compare_with_bands(expected, history)
    rows = []
    for band in expected.bands:
        edges = str(band).removeprefix(band.metric)
        rows.append((band.metric, edges, verdict.state_of(band), band.source))
    promise = f"<p>Not promised: {html.escape(expected.not_promised)}</p>" if expected.not_promised else ""
    table = html_table(("metric", "expected", "this run", "source"), rows)
    title = f"<h2>Expected <small>{html.escape(str(verdict))}</small></h2>"
    return f'{title}<section class="phases">{table}</section>{promise}'


# --- where the time went --------------------------------------------------------------------------------


def phases_section(history: Sequence[Mapping[str, Any]]) -> str:
    """A bar, a chart over steps and a table for each lane; empty where no step was timed."""
    shown = ""
    for lane, means in mean_seconds(history).items():
        if means:
            shown += _lane(history, lane, means)
    return f'<h2>Where the time went</h2><section class="phases">{shown}</section>' if shown else ""


def _lane(history: Sequence[Mapping[str, Any]], lane: str, means: Sequence[tuple[str, float]]) -> str:
    whole = f"time/{SAMPLING}_s" if lane == SAMPLING else "time/step_s"
    keys = [(name, PHASE_COLORS.get(name, OTHER)) for name, _ in means]
    rows = []
    for record in history:
        if whole in record:
            values = [record.get(f"time/{name}_s", 0.0) for name, _ in means if name != "other"]
            rest = [max(record[whole] - sum(values), 0.0)] if means[-1][0] == "other" else []
            rows.append((record["step"], values + rest))
    title = f"Seconds per step: {lane}" if lane else "Seconds per step"
    chart = Chart(title, (), "What each step spent its time on.", wide=True)
    total = sum(seconds for _, seconds in means) or 1.0
    bar = ""
    table = []
    for (name, color), (_, seconds) in zip(keys, means, strict=True):
        share = 100 * seconds / total
        bar += f'<i class="b{color}" style="width:{share:.2f}%" title="{html.escape(name)}"></i>'
        whole_run = format_duration(seconds * len(rows))
        table.append((color_key(name, color), f"{share:.1f}%", f"{seconds:.3g} s", whole_run))
    shown = html_table(("phase", "share", "mean per step", "total"), table)
    return f'<div class="bar">{bar}</div>{stacked_bars(chart, rows, keys)}{shown}'


# --- configuration and attempts -------------------------------------------------------------------------


def _config(path: Path) -> tuple[RunConfig | None, str]:
    """The configuration, and its table: one block per section, values that are not the default in bold."""
    if not path.exists():
        return None, ""
    try:
        config = configuration.load(path)
    except ConfigError:  # written by another version: show it as it is
        text = html.escape(path.read_text(errors="replace"))
        return None, f'<h2>Configuration</h2><pre class="raw">{text}</pre>'
    default = configuration.to_dict(RunConfig())
    blocks = ""
    for section, values in configuration.to_dict(config).items():
        # A field that stands outside a section is shown as a section of its own.
        own, usual = ({section: of} if not isinstance(of, dict) else of for of in (values, default[section]))
        rows = ""
        for key, value in own.items():
            row_class = "" if usual.get(key) == value else " class=set"
            rows += f"<tr{row_class}>{table_cells([key, _value(value)])}</tr>"
        blocks += f"<table><caption>{html.escape(section)}</caption>{rows}</table>"
    title = "<h2>Configuration <small>bold: not the default</small></h2>"
    return config, f'{title}<section class="config">{blocks}</section>'


def _value(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value) or "–"


def _attempts(attempts: Sequence[dict[str, Any]]) -> str:
    if len(attempts) < 2:
        return ""
    rows = []
    for i, attempt in enumerate(attempts, 1):
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(attempt["unix_s"]))
        after = str(attempt["resume_step"] or "the beginning")
        rows.append((str(i), began, str(attempt.get("host", "")), after))
    table = html_table(("", "started (UTC)", "host", "continued after step"), rows, "attempts")
    return f'<h2>Attempts</h2><section class="phases">{table}</section>'


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.observe.report", description=write_report.__doc__
    )
    parser.add_argument("run_dir", type=Path, nargs="+")
    parser.add_argument(
        "--out", type=Path, default=Path("comparison.html"), help="of several runs: where it goes"
    )
    args = parser.parse_args(argv)
    try:
        several = len(args.run_dir) > 1
        print(compare.write_comparison(args.run_dir, args.out) if several else write_report(args.run_dir[0]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
