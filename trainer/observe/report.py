"""The report of a run: one self-contained HTML page, `python -m trainer.observe.report RUN_DIR`. compare.py:
several.

Curves, phase times, samples with their images, the resolved configuration. The page loads nothing (its own
content policy forbids it), and its size is bounded: curves are thinned, samples are chosen, images are
inlined.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer import config as configuration
from trainer.config import ConfigError, Expected, RunConfig
from trainer.config.model_name import model_name
from trainer.config.run_folder import (
    ATTEMPTS,
    CONFIG,
    LAUNCH_LOG,
    MOST_S,
    NODES,
    REPORT,
    ROSTER,
    file_tail,
    read_lines,
    read_progress,
    read_roster,
)
from trainer.observe import compare, guards, report_page
from trainer.observe.charts import Chart, Line, format_number, line_chart, series
from trainer.observe.history import column, read_history
from trainer.observe.live import format_duration
from trainer.observe.report_charts import (
    CHARTS,
    HELD_OUT,
    chart_with_band,
    expectation_section,
    phases_section,
    scores_page,
    with_edges,
)
from trainer.observe.report_page import html_page, readable
from trainer.system.exit_codes import MEANINGS
from trainer.system.terminal_text import terminal_line

WARNING = "warning: "
MOST_WARNINGS = 8
"""Warnings of the log that the page repeats, the newest."""
STOOD_STILL = 1e-6
"""A reward whose values differ by less has not moved."""


def last_line(run_dir: str | Path) -> str:
    """Writes the report of a run that has ended, and says where it is, or why there is none: all that was
    paid for is kept by then, and a failed end would start the run again."""
    try:
        return f"report: {write_report(run_dir)}"
    except Exception as error:
        again = f"python3 launch.py report {run_dir}"
        return f"warning: the report was not written ({type(error).__name__}: {error}); `{again}` tries again"


def write_report(run_dir: str | Path) -> Path:
    """Writes `report.html` into the run directory and returns its path.

    Raises ConfigError where there is no run.
    """
    run_dir = Path(run_dir)
    history = read_history(run_dir)
    if not history and (scored := run_dir / "benchmarks.json").exists():
        (run_dir / REPORT).write_text(
            scores_page(report_page.run_name(run_dir), json.loads(scored.read_text())), encoding="utf-8"
        )
        return run_dir / REPORT
    if not history:
        raise ConfigError(
            f"no metrics in {run_dir}: give the directory of a run that has made at least one step"
        )
    attempts = _starts(run_dir)
    marks = [a["resume_step"] for a in attempts if a["resume_step"] > 0]
    progress = read_progress(run_dir)
    config, config_html = _config(run_dir / CONFIG)
    name = config.run_id if config else report_page.run_name(run_dir)
    expected = config.expected if config else Expected()
    drawn = with_edges(history, expected)
    charts = line_chart(chart_with_band(_hero(marks), expected), drawn, marks)
    charts += line_chart(_by_source(history), history, marks)
    for chart in CHARTS:
        charts += line_chart(chart_with_band(chart, expected), drawn, marks)
    cost = report_page.read_cost(run_dir)
    learned = not _stood_still(history)
    sections = [
        _header(name, config, progress, history, attempts, learned),
        _problems(run_dir, config, progress, history, learned),
        _tiles(history, progress, attempts, cost),
        expectation_section(expected, history),
        f'<section class="charts">{charts}</section>',
        phases_section(history),
        readable(NODES, lambda: report_page.nodes_section(read_lines(run_dir / NODES))),
        readable(ROSTER, lambda: report_page.workers_section(read_roster(run_dir))),
        report_page.samples_section(run_dir),
        config_html,
        _attempts(attempts),
    ]
    path = run_dir / REPORT
    path.write_text(html_page(name, "".join(sections)), encoding="utf-8")
    return path


def _starts(run_dir: Path) -> list[dict[str, Any]]:
    """The starts of the trainer, without lines that no trainer wrote."""
    starts = []
    for line in read_lines(run_dir / ATTEMPTS):
        at, step = line.get("unix_s"), line.get("resume_step")
        if isinstance(at, int | float) and 0 <= at < MOST_S and type(step) is int:
            starts.append(line)
    return starts


def _by_source(history: Sequence[dict[str, Any]]) -> Chart:
    """Held-out accuracy of every source, where the data has several; the first eight by name."""
    names = {name for record in history for name in record if name.startswith("eval/accuracy_")}
    lines = []
    for color, name in enumerate(sorted(names)[:8], 1):
        lines.append(Line(name, name.removeprefix("eval/accuracy_"), color, dots=True))
    more = f" The first 8 of {len(names)}." if len(names) > 8 else ""
    return Chart(
        title="Held-out accuracy by source",
        lines=tuple(lines),
        note=f"Sources of the held-out rows.{more}",
        percent=True,
        wide=True,
    )


def _hero(marks: Sequence[int]) -> Chart:
    return replace(HELD_OUT, note=HELD_OUT.note + " Dotted: the run was resumed here.") if marks else HELD_OUT


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
    began = attempts[0]["unix_s"] if attempts else history[0].get("time/unix_s", 0)
    facts = [time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime(began))] if began else []
    if config:
        facts.insert(0, f"{config.method.upper()} of {model_name(config.model.path)}")
        if config.run.name != name:
            facts.insert(0, config.run.name)
        where = "GPU" if config.placement.device == "cuda" else "CPU rank"
        world = config.placement.world_size
        facts.insert(len(facts) - bool(began), f"{world} {where}{'s' if world > 1 else ''}")
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
    for trouble in guards.troubles_of(config, history) if config else []:
        steps = (
            f"{trouble.first:,}"
            if trouble.first == trouble.last
            else f"{trouble.first:,} to {trouble.last:,}"
        )
        what = f"Step {steps} (guard {trouble.guard})"
        problems.append((what, trouble.finding, guards.REMEDIES[trouble.guard]))
    problems += [("Warning", warning, "") for warning in _warnings(run_dir)]
    if not problems:
        return ""
    items = ""
    for what, finding, remedy in problems:
        sentence = html.escape(terminal_line(finding).rstrip("."))
        items += f"<li><b>{html.escape(what)}:</b> {sentence}. <i>{html.escape(remedy)}</i></li>"
    return f'<section class="problems"><h2>What went wrong</h2><ul>{items}</ul></section>'


def _warnings(run_dir: Path) -> list[str]:
    """The newest warnings of the run's log that are no guard's, each once."""
    path = run_dir / LAUNCH_LOG
    warnings: dict[str, None] = {}
    for line in file_tail(path).decode(errors="replace").splitlines() if path.is_file() else ():
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
    held_out = series(history, "eval/accuracy")
    if held_out:
        first, last = held_out[0][1], held_out[-1][1]
        change = (
            f"{100 * (last - first):+.1f} points, from {format_number(first, True)}"
            if len(held_out) > 1
            else ""
        )
        tiles.append(("held-out accuracy", f"{100 * last:.1f}%", change))
    for title, name, form in (
        ("reward", "reward/mean", "{:.3f}"),
        ("loss", "sft/loss", "{:.4f}"),
        ("KL to the reference", "kl/mean", "{:.2g}"),
    ):
        values = column(history, name)
        if values:
            window = max(1, min(10, len(values) // 4))
            early, late = sum(values[:window]) / window, sum(values[-window:]) / window
            of = "last step" if window == 1 else f"mean of the last {window} steps"
            tiles.append(
                (title, form.format(late), f"{of}, from {form.format(early)}" if len(values) > 1 else "")
            )
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


# --- configuration and attempts -------------------------------------------------------------------------


def _config(path: Path) -> tuple[RunConfig | None, str]:
    """The configuration, and its table: one block per section, values that are not the default in bold."""
    if not path.exists():
        return None, ""
    try:
        config = configuration.load(path)
    except ConfigError:  # written by another version: show it as it is
        return (
            None,
            f'<h2>Configuration</h2><pre class="raw">{html.escape(path.read_text(errors="replace"))}</pre>',
        )
    default = configuration.to_dict(RunConfig())
    blocks = ""
    for section, values in configuration.to_dict(config).items():
        usual = default[section]
        # A field that stands outside a section is shown as a section of its own.
        if not isinstance(values, dict):
            values = {section: values}
        if not isinstance(usual, dict):
            usual = {section: usual}
        rows = ""
        for key, value in values.items():
            row_class = "" if usual.get(key) == value else " class=set"
            rows += f"<tr{row_class}>{report_page.table_cells([key, _value(value)])}</tr>"
        blocks += f"<table><caption>{html.escape(section)}</caption>{rows}</table>"
    return config, (
        "<h2>Configuration <small>bold: not the default</small></h2>"
        f'<section class="config">{blocks}</section>'
    )


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value or "–"
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _attempts(attempts: Sequence[dict[str, Any]]) -> str:
    if len(attempts) < 2:
        return ""
    rows = []
    for i, attempt in enumerate(attempts, 1):
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(attempt["unix_s"]))
        rows.append(
            (str(i), began, str(attempt.get("host", "")), str(attempt["resume_step"] or "the beginning"))
        )
    head = ("", "started (UTC)", "host", "continued after step")
    table = report_page.html_table(head, rows, "attempts")
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
