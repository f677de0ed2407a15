"""What SkyPilot and dstack say of a run: its state, place, end and cost, from what their programs print as
JSON."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from recipes.drivers import engines
from recipes.plan import cost, prices
from recipes.presets import resolve
from recipes.run_record import RunRecord
from recipes.targets import restarts
from trainer.config import ConfigError

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
    usd_per_hour: float = 0.0
    """Of all nodes that it has rented now; 0: not known."""
    rented: str = ""
    """What these are."""
    name: str = ""
    """The engine's own name for it, where it is not ours."""
    whole: bool = True
    """Whether there is no more to ask it for."""


def ask(record: RunRecord) -> Said | None:
    """Asks SkyPilot or dstack; None for other engines, and where the engine does not answer."""
    if record.target.startswith("skypilot"):
        return _job(record) if record.managed else _cluster(record)
    return _dstack(record) if record.target.startswith("dstack") else None


def _rows(*command: str) -> Any:
    """The JSON that a command prints; None if there is none."""
    program = engines.find(command[0])
    done = (
        subprocess.run([program or command[0], *command[1:]], capture_output=True, text=True)
        if program
        else None
    )
    start = min((i for i in map(done.stdout.find, "[{") if i >= 0), default=-1) if done else -1
    return json.loads(done.stdout[start:]) if done and done.returncode == 0 and start >= 0 else None


def _job(record: RunRecord) -> Said | None:
    rows = _rows("sky", "jobs", "queue", "-a", "-v", "-o", "json")
    mine = [row for row in rows or [] if row["job_name"] == record.run_id]
    if not mine:
        return None
    job = max(mine, key=lambda row: row["job_id"])
    place = ", ".join(
        job[key] for key in ("infra", "cluster_resources") if job.get(key) not in (None, "", "-")
    )
    why = f" ({job['failure_reason']})" if job.get("failure_reason") else ""
    moved = f"recovered {job.get('recovery_count') or 0} times"
    text = f"managed job {job['job_id']}: {job['status']}{why}, {place or 'no machine yet'}, {moved}"
    end = (job.get("end_at") or time.time()) if _over(job["status"]) else 0.0
    usd, what = (0.0, "") if end else _rented(record, job)
    return Said(text=text, ended_s=end, name=str(job["job_id"]), usd_per_hour=usd, rented=what)


def _rented(record: RunRecord, job: dict[str, Any]) -> tuple[float, str]:
    """(dollars per hour, what) of a managed job's machines, from SkyPilot's description and our price
    list."""
    gpu = next(iter(job.get("accelerators") or {}), "")
    spot, cloud = "[spot]" in (job.get("cluster_resources") or ""), (job.get("cloud") or "").lower()
    try:
        recipe = resolve(record.recipe, record.overrides)
    except ConfigError:  # a recipe file that is gone
        return 0.0, ""
    usd = cost.rented_usd(recipe, record.target, cloud, gpu, spot, prices.sky_catalogs()) if gpu else 0.0
    return usd, f"{job.get('infra') or cloud}, {job['cluster_resources']}" if usd else ""


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
    if run["status"] == "done" and (line := _final_line(name)):
        # dstack gets 0 so that it does not start the run again: its own status does not show success.
        return Said(text=f"dstack run {name}: FAILED: {line}", ended_s=_ended(run), usd=run.get("cost"))
    text = f"dstack run {name}: {run['status']}" + (f" ({why})" if why else "")
    if _over(run["status"]):
        return Said(text=text, ended_s=_ended(run), usd=run.get("cost"))
    nodes = [job["job_submissions"][-1].get("job_provisioning_data") for job in run.get("jobs", [])]
    found = [node for node in nodes if node]
    what = f"{len(found)} x {found[0]['instance_type']['name']} in {found[0]['region']}" if found else ""
    per_hour = sum(node["price"] for node in found)
    return Said(text=text, usd=run.get("cost"), usd_per_hour=per_hour, rented=what)


def _ended(run: dict[str, Any]) -> float:
    return datetime.fromisoformat(run["last_processed_at"]).timestamp()


def _final_line(name: str) -> str:
    """The line with which a run on dstack says that it ended for good, if its log has one."""
    program = engines.find("dstack")
    done = (
        subprocess.run([program, "logs", name], capture_output=True, text=True, errors="replace")
        if program
        else None
    )
    lines = done.stdout.splitlines() if done else []
    return next((line.strip() for line in reversed(lines) if restarts.FINAL in line), "")


def _over(state: str) -> bool:
    return state.upper().startswith(OVER)
