"""`status`: the runs launched from here, their cost so far and last step; of one run also what its engine
says."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from recipes import run_record
from recipes.drivers import engine_state, launching
from recipes.run_record import RUNS, RunRecord


def show(run: str | None) -> int:
    """One line per run, what it cost beside what was planned; of a single run also what its engine says."""
    names = [run] if run else run_record.names()
    said = engine_state.ask(run_record.load(run)) if run else None
    if run and said:
        record = run_record.load(run).seen(said.usd_per_hour, said.rented)
        if ended_s := record.ended_s or said.ended_s:
            record = replace(record, counted_usd=said.usd, ended_s=ended_s)
        record.save()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("run", "target", "started", "hours (plan)", "$ at most (plan)", "last step"):
        table.add_column(column)
    for name in names:
        record = run_record.load(name)
        if said and said.usd is not None:
            record = replace(record, counted_usd=said.usd)
        started = time.strftime("%m-%d %H:%M", time.gmtime(record.started_s))
        spent = f"{record.usd():.2f}" if record.usd_per_hour or record.rented else "-"
        hours = f"{record.hours():.1f}" + (f" ({record.planned_hours:.1f})" if record.planned_hours else "")
        spent += f" ({record.planned_usd:.0f})" if record.planned_usd else ""
        table.add_row(name, record.target, started, hours, spent, last_step(record))
    Console().print(table if names else "no run was launched from here")
    if said:
        print(said.text)
    if said and said.usd_per_hour:
        print(
            f"rented: {said.rented}: ${said.usd_per_hour:.2f} per hour{_expected(run_record.load(run or ''))}"
        )
    return 0 if not run or (said and said.whole) else launching.drive(run, "status")


def _expected(record: RunRecord) -> str:
    return f" (at the launch the cheapest was ${record.usd_per_hour:.2f})" if record.usd_per_hour else ""


def last_step(record: RunRecord) -> str:
    """The last line of the run's metrics, where they are on this machine or were fetched."""
    path = run_record.metrics_of(RUNS / record.run_id)
    if not path:
        return "-"
    lines = path.read_text().splitlines()
    if not lines:
        return "-"
    row = json.loads(lines[-1])
    reward = row.get("reward/mean")
    return f"{row['step']}" + (f", reward {reward:.2f}" if reward is not None else "")
