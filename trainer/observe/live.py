"""The live display of a run, followed from another process: `python -m trainer.observe.live RUN_DIR`, or
`follow`.

It reads what the trainer writes (metrics.jsonl, progress.json) and nothing else, so it can be started,
stopped and started again at any time. On a terminal it redraws in place; elsewhere it prints one line per
step.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer.config.growing_file import GrowingFile
from trainer.config.run_folder import (
    LAUNCH_LOG,
    METRICS,
    NODES,
    ROSTER,
    lane_progress,
    newest_lines,
    read_progress,
    read_roster,
)
from trainer.observe.history import column, merge_lines, read_history, run_name
from trainer.observe.phases import mean_seconds
from trainer.system.terminal_text import terminal_line

REFRESH_S = 1.0
BLOCKS = "▁▂▃▄▅▆▇█"
MAX_NODES = 16
MAX_ENDED = 4
"""Most ended rollout workers that are listed."""
PHASE_COLORS = {
    "rollout": "dodger_blue2",
    "grade": "dark_orange",
    "wait": "grey37",
    "update": "green3",
    "sync": "deep_sky_blue4",
    "checkpoint": "indian_red",
    "eval": "gold3",
    "other": "grey50",
}
ROWS = (
    ("reward", "reward/mean", "{:.3f}", 0),
    ("accuracy", "reward/accuracy", "{:.1%}", 1),
    ("format", "reward/format", "{:.1%}", 4),
    ("held-out accuracy", "eval/accuracy", "{:.1%}", 0),
    ("loss", "sft/loss", "{:.4f}", 0),
    ("KL to reference", "kl/mean", "{:.2e}", 2),
    ("entropy", "entropy/mean", "{:.3f}", 4),
    ("completion tokens", "tokens/response_mean", "{:.1f}", 2),
    ("cut short", "tokens/truncated_fraction", "{:.1%}", 3),
    ("groups all alike", "group/zero_std_fraction", "{:.1%}", 3),
    ("gradient norm", "grad/norm", "{:.3f}", 4),
    ("engine mismatch", "mismatch/logprob_abs_mean", "{:.1e}", 5),
    ("older weights", "staleness/logprob_abs_mean", "{:.1e}", 6),
    ("waited for samples", "fleet/wait_s", "{:.1f} s", 4),
    ("workers", "fleet/workers", "{:.0f}", 4),
    ("workers idle", "fleet/idle_share", "{:.0%}", 6),
    ("decode slots used", "perf/slots_used", "{:.0%}", 6),
    ("rollout tokens/s", "perf/rollout_tokens_per_s", "{:,.0f}", 3),
    ("training tokens/s", "perf/train_tokens_per_s", "{:,.0f}", 5),
)
"""Label, metric, format, rank (see `DisplayRow`); a row is shown once its metric has been seen."""
OF_A_LINE = (
    ("reward/mean", "reward", ".3f"),
    ("reward/accuracy", "accuracy", ".1%"),
    ("eval/accuracy", "held-out", ".1%"),
    ("eval/loss", "held-out loss", ".4f"),
    ("loss/total", "total loss", ".4f"),
    ("sft/loss", "loss", ".4f"),
    ("kl/mean", "kl", ".2e"),
    ("tokens/response_mean", "tokens", ".1f"),
    ("mismatch/logprob_abs_mean", "mismatch", ".1e"),
)
"""What a line of the log says of a step."""


class MetricsTail:
    """Reads a growing metrics.jsonl piece by piece, and from the beginning where a resumed run has rewritten
    it."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._steps: dict[int, dict[str, Any]] = {}

    def read(self) -> list[dict[str, Any]]:
        """Takes in complete new lines and returns them."""
        lines = self._file.read()
        if self._file.begun_anew:
            self._steps = {}
        return merge_lines(self._steps, lines.splitlines(keepends=True))

    @property
    def history(self) -> list[dict[str, Any]]:
        """Metrics per step so far."""
        return list(self._steps.values())


def follow(
    run_dir: str | Path,
    stop: Callable[[], bool] | None = None,
    console: Console | None = None,
    poll_s: float = REFRESH_S,
) -> str:
    """Shows the run until `stop()` is true (None: until the run says that it has ended), and once more after
    it. Returns its last status. With `stop`, what an earlier attempt left in the run directory is not shown
    as news."""
    console = console or Console()
    run_dir = Path(run_dir)
    began = newest_s = time.time() if stop else 0.0
    log = GrowingFile(run_dir / LAUNCH_LOG)
    if stop:
        log.read()
    warning = ""
    tail = MetricsTail(run_dir / METRICS)
    shown = Live(console=console, auto_refresh=False, vertical_overflow="visible")
    with shown if console.is_terminal else contextlib.nullcontext():
        while True:
            over = stop() if stop else False
            ended = read_progress(run_dir).get("status", "running") != "running"
            # after the status, so that no line of an ended run is missed; before what is shown with it
            new = tail.read()
            progress = read_progress(run_dir)
            if stop and not over and progress.get("updated_unix_s", 0) < began:
                progress = {}
            if console.is_terminal:
                for line in log.read().decode(errors="replace").splitlines():
                    warning = line if line.startswith("warning: ") else warning
                size = console.size
                shown.update(
                    render_display(run_dir, progress, tail.history, size.width, size.height, warning),
                    refresh=True,
                )
            for record in new if not console.is_terminal else ():
                if not newest_s or record.get("time/unix_s", newest_s) > newest_s:
                    newest_s = record.get("time/unix_s", newest_s)
                    line = step_line(record, progress.get("total_steps") or 0)
                    console.print(line, highlight=False, soft_wrap=True)
            if over or (ended and not stop):
                return str(progress.get("status", "unknown"))
            time.sleep(poll_s)


# --- what is shown --------------------------------------------------------------------------------------


def step_line(record: dict[str, Any], total_steps: int) -> str:
    """One step as one line, for logs. total_steps: 0 where it is not known."""
    parts = [f"step {record['step']}/{total_steps}" if total_steps else f"step {record['step']}"]
    for name, label, form in OF_A_LINE:
        if name in record:
            parts.append(f"{label} {record[name]:{form}}")
    if "time/step_s" in record:
        phases = ""
        for lane in mean_seconds([record]).values():
            for name, seconds in lane:
                if name != "other":
                    phases += f" {name} {seconds:.1f}"
        took = f"{record['time/step_s']:.1f} s"
        parts.append(f"{took} ({phases.lstrip()})" if phases else took)
    return " | ".join(parts)


def format_duration(seconds: float) -> str:
    """3 -> "3 s", 200 -> "3 min 20 s", 8000 -> "2 h 13 min", 200000 -> "2 d 7 h"."""
    if not math.isfinite(seconds):
        return "–"
    s = round(seconds)
    for big, small, unit, sub in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if s >= big:
            return f"{s // big} {unit} {s % big // small} {sub}"
    return f"{s} s"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in at most `width` block characters, each the mean of its share; gaps where not
    finite."""
    count = min(len(values), width)
    edges = [round(i * len(values) / count) for i in range(count + 1)] if count else []
    means = []
    for first, last in pairwise(edges):
        finite = list(filter(math.isfinite, values[first:last]))
        means.append(sum(finite) / len(finite) if finite else math.nan)
    known = list(filter(math.isfinite, means))
    if not known:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    line = ""
    for mean in means:
        line += " " if math.isnan(mean) else BLOCKS[min(int((mean - low) / span * 8), 7)]
    return line


@dataclass(frozen=True)
class DisplayRow:
    """One line of the display."""

    group: str
    """Rows of one group stand in one table, groups apart."""
    rank: int
    """The rows of the highest rank are left out first where the terminal is low."""
    cells: tuple[RenderableType, ...]


def render_display(
    run_dir: Path,
    progress: dict[str, Any],
    history: Sequence[dict[str, Any]],
    width: int,
    height: int = 0,
    warning: str = "",
) -> RenderableType:
    """The whole display of a run, with its nodes and workers as they stand now. height: the terminal's lines,
    of which one stays free; 0: as many as it takes. warning: the newest of the run's log."""
    width = min(width, 110)
    rows = [DisplayRow("headline", 0, (_headline(progress, history, width - 6),))]
    for words, style in (
        (progress.get("why"), "dim"),
        (progress.get("restarts"), "dim"),
        (warning, "yellow"),
    ):
        if words:
            rows.append(DisplayRow("why", 1, (_text(words, style),)))
    rows += _values(history, width - 6)
    for lane, phases in mean_seconds(history[-20:]).items():
        rows += _phase_rows(lane, phases, width - 6)
    for file, rows_of in ((NODES, _node_rows), (ROSTER, _worker_rows)):
        try:
            rows += rows_of(run_dir)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError):  # a stranger's, say
            rows.append(DisplayRow(file, 3, (_text(f"{file} is not what a run writes", "dim"),)))

    room = height - 3 if height else len(rows) * 2 + 2
    by_rank = sorted(rows, key=attrgetter("rank"))
    kept = [row for row in rows if row in by_rank[: max(room, 1)]]
    color = {"running": "cyan", "finished": "green", "failed": "red"}
    body, spread = _grouped(kept, room)
    return Panel(
        Group(*body),
        title=Text(terminal_line(run_name(run_dir)), "bold"),
        title_align="left",
        subtitle=_state(progress),
        subtitle_align="right",
        border_style=color.get(progress.get("status", "starting"), "yellow"),
        box=box.ROUNDED,
        padding=(1 if spread else 0, 2),
        width=width,
    )


def _grouped(rows: Sequence[DisplayRow], room: int) -> tuple[list[RenderableType], bool]:
    """The rows as one table per group; blank lines between them, and at the edges of the panel, as far as
    there is room. Returns whether there is room at the edges, too."""
    groups = [list(group) for _, group in groupby(rows, key=attrgetter("group"))]
    free = room - len(rows)
    apart = free >= len(groups) - 1
    body: list[RenderableType] = []
    for group in groups:
        if body and apart:
            body.append(Text(""))
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, style="dim" if len(group[0].cells) > 1 else "")
        if group[0].group == "values":
            table.add_column(justify="right", style="bold", no_wrap=True, min_width=9)
        for row in group:
            table.add_row(*row.cells)
        for cells in table.columns:
            cells.no_wrap = True
        body.append(table)
    return body, free >= len(groups) + 1


def _text(words: object, style: str = "") -> Text:
    """Words from outside: no markup, no control character, one line."""
    return Text(terminal_line(words), style, no_wrap=True, overflow="ellipsis")


def _state(progress: dict[str, Any]) -> Text:
    status = progress.get("status", "starting")
    if status != "running":
        styles = {"finished": "bold green", "failed": "bold red"}
        return _text(status, styles.get(status, "bold"))
    text = _text("")
    for lane in lane_progress(progress):
        what = progress.get("message") or lane.phase
        if lane.name:
            what = f"{lane.name} step {lane.step}: {what}"
        text.append(f" · {terminal_line(what)} " if text else f"{terminal_line(what)} ")
        text.append(format_duration(max(time.time() - lane.since_unix_s, 0)), style="dim")
    return text


def _headline(progress: dict[str, Any], history: Sequence[dict[str, Any]], width: int) -> RenderableType:
    """How far the run is, by the mean of its last 20 steps."""
    total = round(progress.get("total_steps") or 0)
    done = history[-1]["step"] if history else 0
    text = Text.assemble(("step ", "dim"), (f"{done}", "bold"), (f" of {total}" if total else "", "dim"))
    recent = column(history[-20:], "time/step_s")
    if recent:
        step_s = sum(recent) / len(recent)
        text.append("   ").append(f"{step_s:.2f}", style="bold").append(" s/step", style="dim")
        if total > done and progress.get("status") == "running":
            left = format_duration(step_s * (total - done))
            text.append("   ").append(left, style="bold").append(" to go", style="dim")
    if not total:
        return text
    grid = Table.grid(padding=(0, 2))
    wide = max(10, width - text.cell_len - 2)
    grid.add_row(text, ProgressBar(total=total, completed=done, width=wide, finished_style="green"))
    return grid


def _values(history: Sequence[dict[str, Any]], width: int) -> list[DisplayRow]:
    rows = []
    for label, name, form, rank in ROWS:
        values = column(history, name)
        if not values:
            continue
        began = ""
        if name.startswith("eval/") and width > 60:
            first = next(record["step"] for record in history if name in record)
            began = f"  {form.format(values[0])} at step {first}"
        style = {"reward": "green", "eval": "green", "perf": "magenta"}.get(name.partition("/")[0], "cyan")
        line = Text(sparkline(values, max(8, width - 34 - len(began))), style=style)
        line.append(began, style="dim")
        rows.append(DisplayRow("values", rank, (label, form.format(values[-1]), line)))
    return rows


def _phase_rows(lane: str, phases: Sequence[tuple[str, float]], width: int) -> list[DisplayRow]:
    """A bar, and a legend that names the longest phases first, on as many lines as it takes."""
    total = sum(s for _, s in phases) or 1.0
    bar = Text()
    before = 0.0
    for name, seconds in phases:
        cells = round((before + seconds) / total * width) - round(before / total * width)
        before += seconds
        bar.append("█" * cells, style=PHASE_COLORS[name])

    legend = [Text(f"{lane}: " if lane else "")]
    for name, seconds in sorted(phases, key=lambda phase: -phase[1]):
        if seconds / total < 0.005:
            continue
        entry = Text.assemble(("■ ", PHASE_COLORS[name]), f"{name} ", (f"{seconds:.2f} s   ", "dim"))
        if legend[-1].cell_len + entry.cell_len - 3 > width:
            legend.append(Text())
        legend[-1].append(entry)
    group = f"phases {lane}"
    return [
        DisplayRow(group, 3, (bar,)),
        DisplayRow(group, 2, (legend[0],)),
        *[DisplayRow(group, 4, (line,)) for line in legend[1:]],
    ]


def _node_rows(run_dir: Path) -> list[DisplayRow]:
    """A line for each node, from its newest sample (trainer/observe/node_monitor.py)."""
    samples = newest_lines(run_dir / NODES)
    newest = {sample["node"]: sample for sample in samples if type(sample.get("node")) is int}
    rows = []
    for number, node in sorted(newest.items())[:MAX_NODES]:
        gpus = node.get("gpus", [])
        words = [f"node {number}", f"{format_duration(max(0.0, time.time() - node['unix_s']))} ago"]
        if gpus:
            busy = column(gpus, "busy_fraction")
            memory = max(column(gpus, "memory_bytes")) / 2**30
            words.append(f"{len(gpus)} GPUs {sum(busy) / len(busy):.0%} busy")
            words.append(f"{memory:.0f} GiB, {max(column(gpus, 'temperature_c'))} °C at most")
        words += [f"CPU {node.get('cpu_fraction', 0):.0%}", f"memory {node.get('memory_fraction', 0):.0%}"]
        words.append(f"disk {node.get('disk_free_bytes', 0) / 2**30:.0f} GiB free")
        rows.append(DisplayRow("nodes", 4, tuple(map(_text, words))))
    if len(newest) > MAX_NODES:
        rows.append(DisplayRow("nodes", 4, (f"and {len(newest) - MAX_NODES} more",)))
    return rows


def _worker_rows(run_dir: Path) -> list[DisplayRow]:
    """A line for each kind of GPU, as the head of a fleet tells them, then why the workers that ended last
    did."""
    workers = read_roster(run_dir)
    rows = []
    for device in dict.fromkeys(worker["device"] for worker in workers):
        alike = [worker for worker in workers if worker["device"] == device]
        alive = [worker for worker in alike if worker["lives"]]
        words = [device, f"{len(alive)} of {len(alike)} workers alive"]
        words.append(f"{sum(column(alive, 'completions_per_s')):.1f} completions/s")
        words.append(f"{sum(column(alike, 'completions')):,} taken")
        rows.append(DisplayRow("workers", 3, tuple(map(_text, words))))
    for worker in [worker for worker in workers if not worker["lives"]][-MAX_ENDED:]:
        rows.append(DisplayRow("ended", 5, (_text(worker["worker"]), _text(f"ended: {worker['why']}"))))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.observe.live", description=follow.__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--once", action="store_true", help="show how it stands now, and end")
    args = parser.parse_args(argv)
    run_dir = args.run_dir
    if not run_dir.is_dir():
        print(f"no run at {run_dir}: give the directory that holds its metrics.jsonl", file=sys.stderr)
        return 2
    if args.once:
        console = Console()
        width = max(console.width, 80)
        console.print(render_display(run_dir, read_progress(run_dir), read_history(run_dir), width))
        return 0
    try:
        follow(run_dir)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
