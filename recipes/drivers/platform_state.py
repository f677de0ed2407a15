"""What SkyPilot, dstack and Kubernetes say of a run: its state, place, end and cost, from what their
programs print as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import itemgetter
from typing import Any

from recipes.drivers import platforms
from recipes.plan import cost, prices
from recipes.platforms import kubernetes, restarts
from recipes.platforms.job_set import SET_LABEL
from recipes.presets import resolve
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError

STATES = {
    "SUCCEEDED": "finished",
    "DONE": "finished",
    "CANCELLED": "stopped",
    "TERMINATED": "stopped",
    "FAILED": "failed",
}
"""How a platform's word for an end begins, and ours."""
LAUNCH_FAILED = "launch failed"
OVERDUE_S = 300.0
"""How late a machine may be to go down before it counts as one that costs on."""
FORGOTTEN_S = 3600.0
"""A launch that the platform does not know this long after it was asked for was never taken: SkyPilot rents
its jobs controller first, and its server works on while the desk is away."""


@dataclass(frozen=True, kw_only=True)
class PlatformAnswer:
    """What a platform says of a run."""

    text: str
    """State, place and recoveries."""
    state: str = ""
    """In one word of ours: running, starting, finished, failed, stopped, gone."""
    why: str = ""
    """Why it failed or was stopped, where the platform says it."""
    ended_s: float = 0.0
    """Unix time from which on it costs nothing; 0: it may still cost."""
    usd: float | None = None
    """What the platform itself has counted."""
    usd_per_hour: float = 0.0
    """Dollars per hour of all nodes that it has rented now; 0 where that is not known."""
    rented: str = ""
    """What these are."""
    name: str = ""
    """The platform's own name for it, where it is not ours."""
    known: bool = True
    """False: the platform answered, and has no run of this name."""
    whole: bool = True
    """Whether there is no more to ask it for."""


@dataclass
class PlatformAnswers:
    """What the platforms' programs print, each asked once, however many runs one looks at."""

    printed: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def rows(self, *command: str) -> Any:
        """The JSON that a command prints; None if there is none."""
        if command not in self.printed:
            self.printed[command] = _json_of(command)
        return self.printed[command]


def ask_platform(record: RunRecord, answers: PlatformAnswers | None = None) -> PlatformAnswer | None:
    """Asks SkyPilot, dstack or Kubernetes; None for other platforms, and where the platform does not
    answer."""
    answers = answers or PlatformAnswers()
    if record.target == "kubernetes":
        return _job_set(record, answers)
    if record.target.startswith("skypilot"):
        of_one = _job if record.managed else _cluster
    elif record.target.startswith("dstack"):
        of_one = _dstack
    else:
        return None
    if record.jobs == 1:
        return of_one(record, answers)
    jobs = []
    for name in record.names():
        said = of_one(replace(record, run_id=name, jobs=1), answers)
        if said is None:
            return None
        jobs.append(said)
    return _together(jobs)


def _together(jobs: list[PlatformAnswer]) -> PlatformAnswer:
    """What a platform says of several jobs, as of one."""
    lines = []
    counted = []
    rates = []
    reasons: dict[str, None] = {}
    rented = []
    for number, said in enumerate(jobs, 1):
        lines.append(f"worker {number}: {said.text}")
        rates.append(said.usd_per_hour)
        if said.usd is not None:
            counted.append(said.usd)
        if said.why:
            reasons[said.why] = None
        if said.rented:
            rented.append(said.rented)

    # A job that the platform has forgotten does not count beside those that it knows.
    known = [said for said in jobs if said.known]
    costing = any(not said.ended_s for said in known)
    states = Counter(said.state for said in known or jobs)
    counts = ", ".join(f"{count} {state}" for state, count in states.items() if state)
    return PlatformAnswer(
        text="\n".join(lines),
        state=counts if len(states) > 1 else next(iter(states)),
        why="; ".join(reasons),
        ended_s=0.0 if costing else max(said.ended_s for said in jobs),
        usd=sum(counted) if counted else None,
        usd_per_hour=sum(rates),
        rented=", ".join(rented),
        known=bool(known),
        whole=all(said.whole for said in jobs),
    )


def is_open(record: RunRecord) -> bool:
    """Whether only the platform can tell if the run still costs: a cluster counts until it was seen to be
    gone."""
    if not record.target.startswith(("skypilot", "dstack", "kubernetes")):
        return False
    if record.target.startswith("skypilot") and not record.managed:
        return record.state not in ("gone", LAUNCH_FAILED)
    return not record.ended_s


def with_answer(record: RunRecord, said: PlatformAnswer | None) -> RunRecord:
    """The record with what its platform says; no answer changes nothing."""
    if said is None:
        return record
    if not said.known:
        return _unknown(record, said)
    ended_s = record.ended_s if record.confirmed else 0.0
    if ended_s and ended_s < time.time() - OVERDUE_S and not said.ended_s:
        ended_s = 0.0  # it was to be gone by then, and costs on
    ended_s = ended_s or said.ended_s
    return replace(
        record.seen(said.usd_per_hour, said.rented),
        confirmed=True,
        ended_s=ended_s,
        counted_usd=said.usd if ended_s else record.counted_usd,
        state=said.state,
        why=said.why or (record.why if record.confirmed else ""),
    )


def _unknown(record: RunRecord, said: PlatformAnswer) -> RunRecord:
    """The record of a run that its platform has not. A queue of jobs forgets what has ended; a cluster is
    gone."""
    if record.confirmed:
        return replace(record, ended_s=record.ended_s or said.ended_s, state=said.state or record.state)
    if record.ended_s or time.time() - record.started_s < FORGOTTEN_S:
        return record
    return launch_failed(record, said.text)


def launch_failed(record: RunRecord, why: str) -> RunRecord:
    """The record of a launch that its platform never took."""
    return replace(record, ended_s=time.time(), state=LAUNCH_FAILED, why=why)


def _json_of(command: tuple[str, ...]) -> Any:
    program = platforms.find_program(command[0])
    if not program:
        return None
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True)
    if done.returncode:
        return None
    # Hints come before it, and colors: an escape sequence has a bracket of its own.
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout)
    for start in re.finditer(r"[\[{]", text):
        try:
            return json.JSONDecoder().raw_decode(text, start.start())[0]
        except json.JSONDecodeError:
            continue
    return None


def _job(record: RunRecord, answers: PlatformAnswers) -> PlatformAnswer | None:
    rows = answers.rows("sky", "jobs", "queue", "-a", "-v", "-o", "json")
    if rows is None:
        return None
    mine = [row for row in rows if row["job_name"] == record.run_id]
    if not mine:
        return PlatformAnswer(text=f"managed job {record.run_id}: not known to SkyPilot", known=False)
    job = max(mine, key=itemgetter("job_id"))
    places = []
    for key in ("infra", "cluster_resources"):
        if job.get(key) not in (None, "", "-"):
            places.append(job[key])
    place = ", ".join(places) or "no machine yet"
    reason = job.get("failure_reason") or ""
    why = f" ({reason})" if reason else ""
    moved = f"recovered {job.get('recovery_count') or 0} times"

    ended_s = 0.0
    usd = 0.0
    what = ""
    if _over(job["status"]):
        ended_s = job.get("end_at") or time.time()
    else:
        usd, what = _rented(record, job)
    return PlatformAnswer(
        text=f"managed job {job['job_id']}: {job['status']}{why}, {place}, {moved}",
        state=_state(job["status"]),
        why=reason,
        ended_s=ended_s,
        name=str(job["job_id"]),
        usd_per_hour=usd,
        rented=what,
    )


def _rented(record: RunRecord, job: dict[str, Any]) -> tuple[float, str]:
    """(dollars per hour, what) of a managed job's machines, from SkyPilot's description and our price
    list."""
    gpu = next(iter(job.get("accelerators") or {}), "")
    spot = "[spot]" in (job.get("cluster_resources") or "")
    cloud = (job.get("cloud") or "").lower()
    try:
        recipe = resolve(record.recipe, record.overrides)
    except ConfigError:  # a recipe file that is gone
        return 0.0, ""
    if not gpu:
        return 0.0, ""
    usd = cost.rented_usd(recipe, record.target, cloud, gpu, spot, prices.sky_catalogs())
    return usd, f"{job.get('infra') or cloud}, {job['cluster_resources']}" if usd else ""


def _cluster(record: RunRecord, answers: PlatformAnswers) -> PlatformAnswer | None:
    # Refreshed: SkyPilot's own list has a cluster that went down by itself until it is asked again.
    rows = answers.rows("sky", "status", "--refresh", "-o", "json")
    if rows is None:
        return None
    mine = [row for row in rows if row["name"] == record.run_id]
    if not mine:
        return PlatformAnswer(
            text=f"cluster {record.run_id}: gone", state="gone", ended_s=time.time(), known=False
        )
    status = mine[0]["status"]
    text = f"cluster {record.run_id}: {status}, {mine[0].get('resources_str') or ''}"
    state = {"INIT": "starting", "UP": "running"}.get(status, status.lower())
    return PlatformAnswer(text=text, state=state, whole=False)


def _dstack(record: RunRecord, answers: PlatformAnswers) -> PlatformAnswer | None:
    name = platforms.dstack_name(record.run_id)
    listed = answers.rows("dstack", "ps", "-a", "--json")
    if listed is None:
        return None
    mine = [row for row in listed.get("runs", []) if row["run_spec"]["run_name"] == name]
    if not mine:
        return PlatformAnswer(text=f"dstack run {name}: not known to dstack", known=False)
    run = max(mine, key=itemgetter("submitted_at"))
    why = run.get("error") or run.get("termination_reason") or ""

    # dstack gets 0 so that it does not start the run again: its own status does not show success.
    line = _final_line(name) if run["status"] == "done" else ""
    if line:
        text = f"dstack run {name}: FAILED: {line}"
        return PlatformAnswer(text=text, state="failed", why=line, ended_s=_ended(run), usd=run.get("cost"))
    text = f"dstack run {name}: {run['status']}" + (f" ({why})" if why else "")
    state = _state(run["status"])
    if _over(run["status"]):
        return PlatformAnswer(text=text, state=state, why=why, ended_s=_ended(run), usd=run.get("cost"))

    nodes = []
    for job in run.get("jobs", []):
        node = job["job_submissions"][-1].get("job_provisioning_data")
        if node:
            nodes.append(node)
    what = ""
    if nodes:
        what = f"{len(nodes)} x {nodes[0]['instance_type']['name']} in {nodes[0]['region']}"
    per_hour = sum(node["price"] for node in nodes)
    return PlatformAnswer(text=text, state=state, usd=run.get("cost"), usd_per_hour=per_hour, rented=what)


def _job_set(record: RunRecord, answers: PlatformAnswers) -> PlatformAnswer | None:
    name = kubernetes.set_name(record.run_id)
    program = platforms.kubectl(record)
    listed = answers.rows(*program, "get", kubernetes.KIND, "-o", "json")
    if listed is None:
        return None
    mine = [row for row in listed["items"] if row["metadata"]["name"] == name]
    if not mine:
        text = f"JobSet {name}: not in the cluster"
        return PlatformAnswer(text=text, state="gone", ended_s=time.time(), known=False)

    of_set = ("-l", f"{SET_LABEL}={name}", "-o", "json")
    jobs = (answers.rows(*program, "get", "jobs", *of_set) or {"items": []})["items"]
    status = mine[0].get("status", {})
    restarted = status.get("restarts", 0)
    ready = 0
    failures = []
    for job in jobs:
        of_job = job.get("status", {})
        restarted += of_job.get("failed", 0)
        ready += of_job.get("ready", 0)
        failure = _condition(of_job, "Failed")
        if failure:
            failures.append(failure)

    ended = _condition(status, "Completed", "Failed")
    if ended:
        failed = ended["type"] == "Failed"
        # A job says more of its failure than the set that it ended.
        why = [*failures, ended][0]["message"] if failed else ""
        return PlatformAnswer(
            text=f"JobSet {name}: {ended['type']}" + (f" ({why})" if why else ""),
            state="failed" if failed else "finished",
            why=why,
            ended_s=datetime.fromisoformat(ended["lastTransitionTime"]).timestamp(),
        )
    if mine[0]["spec"].get("suspend"):
        return PlatformAnswer(text=f"JobSet {name}: waits for its queue", state="queued")

    pods = mine[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"]
    state = "running" if ready == pods else "starting"
    text = f"JobSet {name}: {state}, {ready} of {pods} pods run, restarted {restarted} times"
    if state == "starting":
        found = answers.rows(*program, "get", "pods", *of_set) or {"items": []}
        for why in filter(None, dict.fromkeys(map(_waits_for, found["items"]))):
            text += f"; {why}"
    return PlatformAnswer(text=text, state=state)


def _condition(status: dict[str, Any], *types: str) -> dict[str, Any] | None:
    """The condition of one of these types that holds; None without one."""
    for condition in status.get("conditions", []):
        if condition["type"] in types and condition["status"] == "True":
            return condition
    return None


def _waits_for(pod: dict[str, Any]) -> str:
    """Why a pod does not run yet, in the scheduler's or the node's words; "" where neither says."""
    status = pod.get("status", {})
    for one in status.get("conditions", []):
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return one.get("message", "")
    for container in status.get("containerStatuses", []):
        waiting = container["state"].get("waiting", {})
        if waiting.get("message"):
            return f"{waiting['reason']}: {waiting['message']}"
    return ""


def _ended(run: dict[str, Any]) -> float:
    return datetime.fromisoformat(run["last_processed_at"]).timestamp()


def _final_line(name: str) -> str:
    """The line with which a run on dstack says that it ended for good, if its log has one."""
    program = platforms.find_program("dstack")
    if not program:
        return ""
    done = subprocess.run([program, "logs", name], capture_output=True, text=True, errors="replace")
    for line in reversed(done.stdout.splitlines()):
        if restarts.FINAL in line:
            return line.strip()
    return ""


def _state(word: str) -> str:
    """Our word for a state that is an end; the platform's own for any other."""
    for theirs, ours in STATES.items():
        if word.upper().startswith(theirs):
            return ours
    return word.lower()


def _over(state: str) -> bool:
    return state.upper().startswith(tuple(STATES))
