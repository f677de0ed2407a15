"""The report of a run: one self-contained HTML page, `python -m trainer.observe.report RUN_DIR`. compare.py:
several.

Curves, phase times, samples with their images, the resolved configuration. The page loads nothing (its own
content policy forbids it), and its size is bounded: curves are thinned, samples are chosen, images are
inlined.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer import config as configuration
from trainer.config import ConfigError, Expected, RunConfig
from trainer.config.model_name import model_name
from trainer.config.run_folder import (
    ATTEMPTS,
    CONFIG,
    NODES,
    REPORT,
    ROSTER,
    SAMPLE_IMAGES,
    SAMPLES,
    read_lines,
    read_progress,
    read_roster,
)
from trainer.observe import compare, report_nodes, report_page, report_workers
from trainer.observe.charts import Chart, Line, format_number, line_chart, series
from trainer.observe.history import MOST_S, column, read_history
from trainer.observe.live import format_duration
from trainer.observe.report_bands import chart_with_band, expectation_section, with_edges
from trainer.observe.report_charts import CHARTS, HELD_OUT
from trainer.observe.report_page import html_page
from trainer.observe.report_phases import phases_section
from trainer.observe.report_scores import scores_page
from trainer.system.contained_path import inside

MAX_SAMPLES = 24
IMAGE_KINDS = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"GIF8", "gif"),
    (b"RIFF", "webp"),
)
"""First bytes of the images that a run keeps."""
MAX_PICTURE_BYTES = 6_000_000
"""Bytes of all images in the page; those beyond it are named, not shown."""


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
    name = config.run.name if config else report_page.run_name(run_dir)
    expected = config.expected if config else Expected()
    drawn = with_edges(history, expected)
    charts = line_chart(chart_with_band(_hero(marks), expected), drawn, marks)
    charts += line_chart(_by_source(history), history, marks)
    for chart in CHARTS:
        charts += line_chart(chart_with_band(chart, expected), drawn, marks)
    cost = report_page.read_cost(run_dir)
    sections = [
        _header(name, config, progress, history, attempts),
        _tiles(history, progress, attempts, cost),
        expectation_section(expected, history),
        f'<section class="charts">{charts}</section>',
        phases_section(history),
        _readable(NODES, lambda: report_nodes.nodes_section(read_lines(run_dir / NODES))),
        _readable(
            ROSTER, lambda: report_workers.workers_section(read_roster(run_dir), cost.get("usd_per_1000", {}))
        ),
        _samples(run_dir, _written_samples(run_dir)),
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


def _readable(file: str, section: Callable[[], str]) -> str:
    """A section made from one file of the run, or the sentence that the file is none of a run's: it may be a
    stranger's, and costs no other section."""
    try:
        return section()
    except Exception as error:
        return f'<p class="absent">{file} is not what a run writes ({type(error).__name__}): left out.</p>'


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
) -> str:
    status = progress.get("status", "unknown")
    began = attempts[0]["unix_s"] if attempts else history[0].get("time/unix_s", 0)
    facts = [time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime(began))] if began else []
    if config:
        facts.insert(0, f"{config.method.upper()} of {model_name(config.model.path)}")
        where = "GPU" if config.placement.device == "cuda" else "CPU rank"
        world = config.placement.world_size
        facts.insert(1, f"{world} {where}{'s' if world > 1 else ''}")
    return (
        f"<header><h1>{html.escape(name)}"
        f'<span class="chip {html.escape(status)}">{html.escape(status)}</span></h1>'
        f"<p>{html.escape(' · '.join(facts))}</p></header>"
    )


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
            tiles.append((title, form.format(late), f"from {form.format(early)}" if len(values) > 1 else ""))
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


# --- samples --------------------------------------------------------------------------------------------


def _written_samples(run_dir: Path) -> list[dict[str, Any]]:
    """The samples of a run, without lines that no run wrote."""
    samples = []
    for line in read_lines(run_dir / SAMPLES):
        images = line.get("images", [])
        if type(line.get("step")) is int and isinstance(images, list):
            samples.append(line | {"verdict": str(line.get("verdict", "")), "images": images})
    return samples


def choose_samples(samples: Sequence[dict[str, Any]], limit: int = MAX_SAMPLES) -> list[dict[str, Any]]:
    """At most `limit` samples, by whole steps: the first and the last ones, and evenly between; newest step
    first."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        steps.setdefault(sample["step"], []).append(sample)
    order = sorted(steps)
    while len(order) > 1:
        counts = [len(steps[step]) for step in order]
        if sum(min(count, limit) for count in counts) <= limit:
            break
        keep = max(len(order) * limit // sum(counts), 1)
        order = _evenly(order, min(keep, len(order) - 1))

    chosen = []
    for step in reversed(order):
        chosen += steps[step][:limit]
    return chosen


def _evenly(steps: list[int], count: int) -> list[int]:
    """`count` of the steps, at even distances from the first to the last; the last if one is asked for."""
    if count == 1:
        return steps[-1:]
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _samples(run_dir: Path, samples: Sequence[dict[str, Any]]) -> str:
    if not samples:
        return ""
    chosen = choose_samples(samples)
    left = f"{len(chosen)} written"
    if len(chosen) < len(samples):
        left = f"{len(chosen)} of {len(samples):,} written"
    buttons = ""
    for verdict in sorted({sample.get("verdict", "") for sample in chosen}):
        text = html.escape(verdict.replace("_", " "))
        buttons += f'<button data-verdict="{html.escape(verdict)}">{text}</button>'
    budget = MAX_PICTURE_BYTES
    rows = []
    step = None
    for sample in chosen:
        if sample["step"] != step:
            step = sample["step"]
            rows.append(f'<h3 class="step">step {step:,}</h3>')
        pictures, budget = _pictures(run_dir / SAMPLE_IMAGES, sample["images"], budget)
        rows.append(_readable(SAMPLES, lambda sample=sample, pictures=pictures: _card(sample, pictures)))
    return (
        f"<h2>Samples <small>{left}</small></h2>"
        f'<div class="filter"><button data-verdict="" class="on">all</button>'
        f'{buttons}</div><section class="samples">{"".join(rows)}</section>'
    )


DECIDED_BY = {"exact": "exact arithmetic", "points": "values at points", "text": "its text"}
"""How a card says what decided (docs/rewards.md)."""


def _card(sample: dict[str, Any], pictures: Sequence[str]) -> str:
    verdict = str(sample.get("verdict", ""))
    asked = len(pictures) - sum(sample.get("shown", []))
    beside = "".join(pictures[:asked])
    numbers = [f"reward {format_number(float(sample['reward']))}"] if "reward" in sample else []
    if "advantage" in sample:
        numbers.append(f"advantage {float(sample['advantage']):+.2f}")
    if "tokens" in sample:
        numbers.append(f"{sample['tokens']} tokens")
    rule = DECIDED_BY.get(str(sample.get("rule", "")))
    if rule:
        numbers.append(f"decided by {rule}")
    numbers.append(f"row {sample.get('row', '?')}")
    return (
        f'<article data-verdict="{html.escape(verdict)}"><div class="pictures">{beside}</div>'
        f'<div class="said">'
        f'<p class="question">{html.escape(str(sample.get("question", "")))}</p>'
        f"{_said(sample, pictures[asked:])}"
        f'<p class="grade"><span class="chip {html.escape(verdict)}">'
        f"{html.escape(verdict.replace('_', ' '))}</span>"
        f"<span>ground truth <b>{html.escape(str(sample.get('ground_truth', '')))}</b></span>"
        f"<small>{html.escape(' · '.join(numbers))}</small></p>"
        "</div></article>"
    )


def _said(sample: dict[str, Any], shown: Sequence[str]) -> str:
    """What the model said; of an episode, each reply and what was observed then, with the images that it
    showed."""
    dialog = sample.get("dialog")
    if not dialog:
        return f'<div class="answer">{_answer(str(sample.get("completion", "")))}</div>'
    left = list(shown)
    counts = iter(sample["shown"])
    turns = []
    for turn, text in enumerate(dialog):
        if turn % 2 == 0:
            turns.append(f'<div class="answer">{_answer(text)}</div>')
            continue
        count = next(counts, 0)
        images, left = left[:count], left[count:]
        turns.append(f'<div class="observed"><p>{html.escape(text)}</p>{"".join(images)}</div>')
    return "".join(turns)


def _answer(text: str, limit: int = 4000) -> str:
    """The completion with its think block dimmed and its answer block strong; the middle of a long one is
    left out."""
    if len(text) > limit:
        text = (
            text[: limit // 2] + f"\n[… {len(text) - limit:,} characters left out …]\n" + text[-limit // 2 :]
        )
    safe = html.escape(text)
    safe = re.sub(
        r"(&lt;think&gt;.*?(?:&lt;/think&gt;|$))", r'<span class="think">\1</span>', safe, flags=re.DOTALL
    )
    return re.sub(r"(&lt;answer&gt;.*?&lt;/answer&gt;)", r"<b>\1</b>", safe, flags=re.DOTALL)


def _pictures(folder: Path, names: Sequence[Any], budget: int) -> tuple[list[str], int]:
    """Each image in the page, or its name where it is no image of the run's own or the budget of bytes is
    spent; and what is left of it. folder: that of the run's sample images. The page is made to be handed on:
    no other file of this machine may come into it."""
    parts = []
    for name in names:
        file = inside(folder, str(name).removeprefix(f"{SAMPLE_IMAGES}/"))
        size = file.stat().st_size if file is not None and file.is_file() else 0
        data = file.read_bytes() if file is not None and 0 < size <= budget else b""
        kinds = [kind for first_bytes, kind in IMAGE_KINDS if data.startswith(first_bytes)]
        if not kinds:
            parts.append(f'<span class="absent">{html.escape(str(name))}</span>')
            continue
        budget -= size
        parts.append(f'<img alt="" src="data:image/{kinds[0]};base64,{base64.b64encode(data).decode()}">')
    return parts, budget


# --- configuration and attempts -------------------------------------------------------------------------


def _config(path: Path) -> tuple[RunConfig | None, str]:
    """The configuration, and its table: one block per section, values that are not the default in bold."""
    if not path.exists():
        return None, ""
    try:
        config = configuration.load(path)
    except ConfigError:  # written by another version: show it as it is
        return None, f'<h2>Configuration</h2><pre class="raw">{html.escape(path.read_text())}</pre>'
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
    rows = ""
    for i, attempt in enumerate(attempts, 1):
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(attempt["unix_s"]))
        after = str(attempt["resume_step"] or "the beginning")
        rows += f"<tr>{report_page.table_cells([str(i), began, str(attempt.get('host', '')), after])}</tr>"
    return (
        '<h2>Attempts</h2><section class="phases"><table class="attempts"><thead><tr><th></th>'
        "<th>started (UTC)</th>"
        f"<th>host</th><th>continued after step</th></tr></thead><tbody>{rows}</tbody></table></section>"
    )


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
