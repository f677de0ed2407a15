"""`status`: the runs launched from here, their cost so far and last step; of one run also what its engine says."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from recipes import engines, launching, run_record
from recipes.run_record import RUNS, RunRecord

OVER = ("SUCCEEDED", "CANCELLED", "FAILED", "DONE", "TERMINATED", "GONE")


@dataclass(frozen=True, kw_only=True)
class Said:
    """What an engine says of a run."""

    text: str
    """State, place and recoveries."""
    ended_s: float = 0.0
    """Unix time from which on it costs nothing; 0: it may still cost."""
    usd: float | None = None
    """What the engine itself has counted."""
    whole: bool = True
    """Whether there is no more to ask it for."""


def show(run: str | None) -> int:
    """One line per run; of a single run also what its engine says."""
    names = [run] if run else sorted(p.parent.name for p in RUNS.glob("*/launch.json"))
    said = ask(run_record.load(run)) if run else None
    if run and said and said.ended_s and not run_record.load(run).ended_s:
        replace(run_record.load(run), ended_s=said.ended_s).save()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("run", "target", "started", "hours", "$ so far (at most)", "last step"):
        table.add_column(column)
    for name in names:
        record = run_record.load(name)
        usd = said.usd if said and said.usd is not None else record.usd() if record.usd_per_hour else None
        started = time.strftime("%m-%d %H:%M", time.gmtime(record.started_s))
        spent = "-" if usd is None else f"{usd:.2f}"
        table.add_row(name, record.target, started, f"{record.hours():.1f}", spent, last_step(record))
    Console().print(table if names else "no run was launched from here")
    if said:
        print(said.text)
    return 0 if not run or (said and said.whole) else launching.drive(run, "status")


def ask(record: RunRecord) -> Said | None:
    """Asks SkyPilot or dstack; None for other engines, and where the engine does not answer."""
    if record.target.startswith("skypilot"):
        return _job(record) if record.managed else _cluster(record)
    return _dstack(record) if record.target.startswith("dstack") else None


def _rows(*command: str) -> Any:
    """The JSON that a command prints; None if there is none."""
    program = launching.find(command[0])
    done = subprocess.run([program or command[0], *command[1:]], capture_output=True, text=True) if program else None
    start = min((i for i in map(done.stdout.find, "[{") if i >= 0), default=-1) if done else -1
    return json.loads(done.stdout[start:]) if done and done.returncode == 0 and start >= 0 else None


def _job(record: RunRecord) -> Said | None:
    rows = _rows("sky", "jobs", "queue", "-a", "-o", "json")
    mine = [row for row in rows or [] if row["job_name"] == record.run_id]
    if not mine:
        return None
    job = max(mine, key=lambda row: row["job_id"])
    place = " ".join(filter(None, [job.get("cluster_resources"), job.get("infra")]))
    recoveries = f"{job.get('recovery_count') or 0} recoveries"
    why = f": {job['failure_reason']}" if job.get("failure_reason") else ""
    text = f"managed job {job['job_id']}: {job['status']}{why}, {place or 'no machine yet'}, {recoveries}"
    return Said(text=text, ended_s=(job.get("end_at") or time.time()) if _over(job["status"]) else 0.0)


def _cluster(record: RunRecord) -> Said | None:
    rows = _rows("sky", "status", record.run_id, "-o", "json")
    if rows is None:
        return None
    mine = [row for row in rows if row["name"] == record.run_id]
    if not mine:
        return Said(text=f"cluster {record.run_id}: gone", ended_s=time.time())
    text = f"cluster {record.run_id}: {mine[0]['status']}, {mine[0].get('resources_str') or ''}"
    return Said(text=text, whole=False)


def _dstack(record: RunRecord) -> Said | None:
    listed, name = _rows("dstack", "ps", "-a", "--json"), engines.dstack_name(record.run_id)
    mine = [row for row in (listed or {}).get("runs", []) if row["run_spec"]["run_name"] == name]
    if not mine:
        return None
    run = max(mine, key=lambda row: row["submitted_at"])
    why = run.get("error") or run.get("termination_reason") or ""
    text = f"dstack run {name}: {run['status']}" + (f" ({why})" if why else "")
    end = datetime.fromisoformat(run["last_processed_at"]).timestamp() if _over(run["status"]) else 0.0
    return Said(text=text, ended_s=end, usd=run.get("cost"))


def _over(state: str) -> bool:
    return state.upper().startswith(OVER)


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
