"""A run that was launched from here: asked for and driven through its platform, and closed in its record when
it ends."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time
from dataclasses import replace

from recipes.plan import cost, prices
from recipes.platforms import programs
from recipes.platforms.answers import LAUNCH_FAILED, PlatformAnswer, PlatformAnswers
from recipes.platforms.base import LaunchGiven
from recipes.platforms.targets import target_named
from recipes.presets import resolve
from recipes.records import run_end, run_process, run_record
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError
from trainer.system.exit_codes import EXIT_INTERRUPTED, describe_code

STARTING_S = 60.0
"""A launch on this machine that has left no process id after so long has not begun."""
OVERDUE_S = 300.0
"""How late a machine may be to go down before it counts as one that costs on."""
FORGOTTEN_S = 3600.0
"""A launch that the platform does not know this long after it was asked for was never taken: SkyPilot rents
its jobs controller first, and its server works on while the desk is away."""


def ask_platform(record: RunRecord, answers: PlatformAnswers | None = None) -> PlatformAnswer | None:
    """What a run's platform says of it; None where it does not answer, or has nothing to say."""
    return target_named(record.target).ask(record, answers or new_answers())


def new_answers() -> PlatformAnswers:
    return PlatformAnswers(price=_usd_per_hour)


def _usd_per_hour(record: RunRecord, cloud: str, gpu: str, spot: bool) -> float:
    """Dollars per hour of all nodes of a run, from our price list; 0: not known."""
    try:
        recipe = resolve(record.recipe, record.overrides)
    except ConfigError:  # a recipe file that is gone
        return 0.0
    return cost.rented_usd(recipe, record.target, cloud, gpu, spot, prices.sky_catalogs())


def with_answer(record: RunRecord, answer: PlatformAnswer | None) -> RunRecord:
    """The record with what its platform says; no answer changes nothing."""
    if answer is None:
        return record
    if not answer.known:
        return _record_without_job(record, answer)
    ended_s = record.ended_s if record.confirmed else 0.0
    if ended_s and ended_s < time.time() - OVERDUE_S and not answer.ended_s:
        ended_s = 0.0  # it was to be gone by then, and costs on
    ended_s = ended_s or answer.ended_s
    return replace(
        record.seen(answer.usd_per_hour, answer.rented),
        confirmed=True,
        ended_s=ended_s,
        counted_usd=answer.usd if ended_s else record.counted_usd,
        state=answer.state,
        why=answer.why or (record.why if record.confirmed else ""),
    )


def _record_without_job(record: RunRecord, answer: PlatformAnswer) -> RunRecord:
    """The record of a run that its platform has not. A queue of jobs forgets what has ended; a cluster is
    gone."""
    if record.confirmed:
        return replace(record, ended_s=record.ended_s or answer.ended_s, state=answer.state or record.state)
    if record.ended_s or time.time() - record.started_s < FORGOTTEN_S:
        return record
    return launch_failed(record, answer.text)


def launch_failed(record: RunRecord, why: str) -> RunRecord:
    """The record of a launch that its platform never took."""
    return replace(record, ended_s=time.time(), state=LAUNCH_FAILED, why=why)


def drive_run(run: str, action: str, dry_run: bool = False, job: int = 0) -> int:
    """`status`, `logs` or `down` of a run that was launched from here. job: the one of several whose log is
    meant, from 0 on."""
    record = run_record.load_record(run)
    platform = target_named(record.target)
    if platform.runs_here and record.desk not in ("", socket.gethostname()):
        raise ConfigError(f"{run} runs on {record.desk} itself: drive it there")
    if record.managed and action == "logs":
        record = replace(record, run_id=record.names()[job], jobs=1)
        if not dry_run and (answer := ask_platform(record)):
            # By its name SkyPilot finds only one that is running.
            record = replace(record, cluster=answer.name)
    # Of an adopted run there are no task files here, and nothing but `up` needs them.
    files = [str(path) for path in record.task_files()] or [""]
    commands = platform.commands(record, LaunchGiven(files, {"RUN_ID": run}, [], detach=False))
    code = 0
    wanted = getattr(commands, action)
    if action == "logs":  # on Kubernetes and ssh one command follows the log of all jobs
        wanted = wanted[job : job + 1] or wanted[-1:]
    for command in wanted:
        if dry_run:
            print(shlex.join(command))
            continue
        platform.check_program()
        argv = [programs.find_program(command[0]) or command[0], *command[1:]]
        code = subprocess.run(argv).returncode or code
    if action == "down" and not code and not dry_run:
        note_end(run)
    return code


def end_run(run: str, dry_run: bool = False) -> int:
    """`down` of a run and of all machines that sample for it, these first."""
    code = 0
    for record in run_record.workers_of(run):
        if not record.ended_s and not gone_here(record):
            code = _end_launch(record.run_id, dry_run) or code
    return drive_run(run, "down", dry_run) or code


def give_up(*runs: str) -> None:
    """`down` of launches that failed, or failed in part, whatever their records say: a launch of several jobs
    that ended with an error may have begun some of them."""
    for run in filter(run_record.is_known, runs):
        record = run_record.load_record(run)
        # Slurm and PBS take all of an array or none.
        if record.cluster if target_named(record.target).submits else not gone_here(record):
            _end_launch(run)


def _end_launch(run: str, dry_run: bool = False) -> int:
    """`down` of one launch. What keeps it from being ended is printed, so that others are ended all the
    same."""
    try:
        return drive_run(run, "down", dry_run)
    except ConfigError as error:
        print(f"error: {run} was not ended: {error}", file=sys.stderr, flush=True)
        return 1


def gone_here(record: RunRecord) -> bool:
    """Whether a launch on this machine has no process any more."""
    if not target_named(record.target).runs_here or record.desk not in ("", socket.gethostname()):
        return False
    path = run_record.RUNS / record.run_id / run_process.PROCESS
    if not path.is_file() and time.time() - record.started_s < STARTING_S:
        return False
    return not run_process.process_of(record.run_id)


def settle_launch(launched: RunRecord, code: int, detached: bool, cluster_minutes: float) -> None:
    """Notes what came of a launch whose commands have ended with `code`: what still costs, what never began,
    and why. The record of a later launch of the same run is left alone.

    cluster_minutes: until a SkyPilot cluster goes down by itself after its job.
    """
    record = run_record.load_record(launched.run_id)
    if record.started_s != launched.started_s:
        return
    platform = target_named(record.target)
    down_s = time.time() + (60 * cluster_minutes if platform.is_cluster(record) else 0)
    if not code:
        record = replace(record, confirmed=True)
        if not detached:
            record = replace(record, ended_s=down_s, state="finished")
    elif platform.disposable:
        record = _record_as_platform_tells(record, code, down_s)
    elif platform.driven_from_here and not detached:
        state, why = "stopped", "Ctrl-C"
        if code != EXIT_INTERRUPTED:
            state, why = "failed", run_end.describe_end(record.run_id, code, record.started_s)
        record = replace(record, ended_s=time.time(), state=state, why=why)
    elif not record.ended_s and (not record.confirmed or detached):
        why = "Ctrl-C" if code == EXIT_INTERRUPTED else describe_code(code)
        record = launch_failed(record, why)
    record.save()


def _record_as_platform_tells(record: RunRecord, code: int, down_s: float) -> RunRecord:
    """The record after a launch that did not end with 0, as its platform tells what it has of it."""
    interrupted = code == EXIT_INTERRUPTED
    answer = ask_platform(record)
    record = with_answer(record, answer)
    if record.confirmed:
        if target_named(record.target).is_cluster(record) and not interrupted:
            return replace(record, ended_s=down_s, why=describe_code(code))
        return record
    if answer and not interrupted:
        return launch_failed(record, f"{answer.text}; the launch ended with exit code {code}")
    # After Ctrl-C SkyPilot's server works on what it was asked for, and may have it a minute later.
    run = record.run_id
    print(
        f"the launch of {run} is not confirmed: `python3 launch.py status {run}` asks the platform",
        flush=True,
    )
    return record


def note_end(run: str) -> None:
    """Notes that `down` has given a run's machines back."""
    record = run_record.load_record(run)
    state = record.state if record.ended_s else "stopped"
    if target_named(record.target).is_cluster(record):
        state = "gone"
    replace(record, ended_s=record.ended_s or time.time(), state=state).save()
