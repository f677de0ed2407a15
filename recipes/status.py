"""`status`: the runs launched from here, what they have cost so far and how far they are."""

from __future__ import annotations

import json
import time

from rich.console import Console
from rich.table import Table

from recipes import launching, run_record
from recipes.run_record import RUNS, RunRecord


def show(run: str | None) -> int:
    """One line per run; of a single run also what its engine says."""
    names = [run] if run else sorted(p.parent.name for p in RUNS.glob("*/launch.json"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("run", "target", "started", "hours", "$ so far (at most)", "last step"):
        table.add_column(column)
    for name in names:
        record = run_record.load(name)
        hours = (time.time() - record.started_s) / 3600
        spent = f"{hours * record.usd_per_hour:.2f}" if record.usd_per_hour else "-"
        started = time.strftime("%m-%d %H:%M", time.gmtime(record.started_s))
        table.add_row(name, record.target, started, f"{hours:.1f}", spent, last_step(record))
    Console().print(table if names else "no run was launched from here")
    return launching.drive(run, "status") if run else 0


def last_step(record: RunRecord) -> str:
    """The last line of the run's metrics, where they are on this machine."""
    path = RUNS / record.run_id / "metrics.jsonl"
    if not path.exists():
        return "-"
    lines = path.read_text().splitlines()
    if not lines:
        return "-"
    row = json.loads(lines[-1])
    reward = row.get("reward/mean")
    return f"{row['step']}" + (f", reward {reward:.2f}" if reward is not None else "")
