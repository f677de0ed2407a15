"""`status`: the runs launched from here: where, alive or how they ended, what they cost, their last step.

Platforms are asked once each, and only where a run may still cost; of a single run there is also what its own
says.
"""

from __future__ import annotations

import re
import sys
import textwrap
import time
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

from recipes.drivers import fetched_runs, launched_run
from recipes.platforms.answers import LAUNCH_FAILED, PlatformAnswer
from recipes.platforms.targets import target_named
from recipes.presets import resolve
from recipes.records import run_end, run_process, run_record
from recipes.records.run_record import RUNS, RunRecord
from trainer.config import ConfigError, load, run_folder
from trainer.config.expected import compare_with_bands
from trainer.config.run_folder import RUNNING, SERVING
from trainer.system.terminal_text import terminal_text

WIDTH = 80
"""Columns of the table, which is that of a terminal nobody has resized."""
NOT_CONFIRMED = "launch not confirmed"
BAD_ENDS = ("failed", "died", LAUNCH_FAILED)


def show_runs(run: str | None, bucket: str, watch: bool) -> int:
    """The runs launched from here, or one with what its platform and its files say; live with `watch`.
    Returns the exit code."""
    if watch:
        records = run_record.newest_first()
        if not run and not records:
            raise ConfigError("no run was launched from here: give the id of a run, and --bucket")
        return fetched_runs.watch_run(run or records[0].run_id, bucket)
    if run and not run_record.is_known(run) and fetched_runs.url_of(run, bucket):
        return fetched_runs.show_now(run, bucket)
    try:
        code = show_run(run)
    # the platform's program is not installed here: the bucket is asked all the same
    except ConfigError as error:
        if not (run and fetched_runs.url_of(run, bucket)):
            raise
        print(f"warning: {error}", file=sys.stderr, flush=True)
        code = 0
    return (fetched_runs.show_now(run, bucket) or code) if run else code


def show_run(run: str | None) -> int:
    """A few lines per run, the newest last; of a single run also what its platform says."""
    records = run_record.newest_first()[::-1]
    if run:
        records = [run_record.load_record(run), *run_record.workers_of(run)]
    answers = launched_run.new_answers()
    of_run = None
    shown = []
    of_workers = []
    for record in records:
        answer = None
        if run or target_named(record.target).is_open(record):
            answer = launched_run.ask_platform(record, answers)
        shown.append(with_platform_answer(if_vanished(record), answer))
        of_run = answer if record.run_id == run else of_run
        if run and answer and record.samples_for == run:
            of_workers += [f"{record.run_id}: {line}" for line in answer.text.splitlines()]
    lines = status_table(shown, whole=bool(run)) if shown else ["no run was launched from here"]
    print(terminal_text("\n".join(lines)))
    if not run:
        for name, bucket in fetched_runs.remembered_buckets().items():
            print(terminal_text(f"{name}: fetched from {bucket}, not launched from here"))
        return 0
    for line in of_workers + _left_over(shown):
        print(terminal_text(line))
    if of_run:
        print(terminal_text(of_run.text))
    if of_run and of_run.usd_per_hour:
        planned = shown[0].usd_per_hour
        expected = f" (at the launch the cheapest was ${planned:.2f})" if planned else ""
        print(f"rented: {of_run.rented}: ${of_run.usd_per_hour:.2f} per hour{expected}")
    return 0 if of_run and of_run.whole else launched_run.drive_run(run, "status")


def _left_over(shown: list[RunRecord]) -> list[str]:
    """Workers of a run that has ended which their platforms still have, or look for machines for; [] without
    any. The first record is the run's."""
    run, *workers = shown
    left = [worker.run_id for worker in workers if not worker.ended_s]
    if not left or not run.ended_s or run.ended_s > time.time():
        return []
    return [
        f"{run.run_id} has ended, and {', '.join(left)} may still rent machines, which end by themselves:"
        f" `python3 launch.py down {run.run_id}` ends them now"
    ]


def if_vanished(record: RunRecord) -> RunRecord:
    """The record; of what was left to itself on this machine and is gone, with its end."""
    if record.ended_s or not launched_run.gone_here(record):
        return record
    written = _of_progress(record)
    state = "ended" if written in ("", RUNNING, SERVING) else written
    ended = replace(record, ended_s=time.time(), state=state, why=run_end.last_words(record.run_id))
    ended.save()
    return ended


def with_platform_answer(record: RunRecord, answer: PlatformAnswer | None) -> RunRecord:
    """The record as its platform says it is, kept for the next look; dollars of a run that goes on are only
    shown."""
    now = launched_run.with_answer(record, answer)
    if now != record:
        now.save()
    if answer and answer.usd is not None:
        return replace(now, counted_usd=answer.usd)
    return now


def status_table(records: list[RunRecord], whole: bool) -> list[str]:
    """The lines of all runs in WIDTH columns, then what costs now. whole: reasons are not cut."""
    lines = [f"{'run':<66}started UTC", f"  {'target':<20}{'state':<21}{'hours (plan)':<15}$ at most (plan)"]
    for record in records:
        lines += ["", *_lines(record, whole)]
    return lines + billed_lines(records)


def _lines(record: RunRecord, whole: bool) -> list[str]:
    started = time.strftime("%m-%d %H:%M", time.gmtime(record.first_started_s or record.started_s))
    hours = f"{record.hours():.1f}" + (f" ({record.planned_hours:.1f})" if record.planned_hours else "")
    billed = record.usd_per_hour or record.rented or record.counted_usd or record.earlier_usd
    dollars = f"{record.usd():.2f}" if billed else "-"
    dollars += f" ({record.planned_usd:.0f})" if record.planned_usd else ""
    state = state_of(record)
    lines = [f"{record.run_id:<66}{started}", f"  {record.target:<20}{state:<21}{hours:<15}{dollars}"]
    if record.samples_for:
        lines.append(f"  {record.jobs} to sample for {record.samples_for}")
    step = last_step(record)
    if step:
        lines.append(f"  step {step}")
    comparison = expectation(record)
    words = run_end.last_words(record.run_id) if state in BAD_ENDS else ""
    # `exit code 34` alone says little; the run's own line says why.
    bare = re.fullmatch(r"exit code \d+", record.why) and words
    reason = f"{record.why}: {words}" if bare else record.why or words
    for text in filter(None, (comparison, reason)):
        lines.append(f"  {text if whole else textwrap.shorten(text, WIDTH - 2, placeholder=' ...')}")
    return lines


def state_of(record: RunRecord) -> str:
    """What a run is, in a word or two, as far as this machine knows."""
    if not record.confirmed:
        return record.state if record.ended_s else NOT_CONFIRMED
    if record.ended_s > time.time():
        return "going down"
    if record.ended_s and record.state:
        return record.state
    state = _of_progress(record) or record.state
    return state or ("ended" if record.ended_s else _before_the_run(record))


def _before_the_run(record: RunRecord) -> str:
    """What a launch is that has written nothing yet: on this machine its environment is made first, then its
    data and model, then the run begins."""
    if not run_process.process_of(record.run_id):
        return "launched"
    try:
        environment = resolve(record.recipe, record.overrides).environment
    except ConfigError:  # a recipe file that is gone
        return "preparing"
    made = (Path(".venvs") / environment / ".stamp").exists()
    return "preparing (2 of 3)" if made else "preparing (1 of 3)"


def _of_progress(record: RunRecord) -> str:
    """What the run itself has written; "" where its files are not here."""
    folders = (RUNS / record.run_id, RUNS / record.run_id / run_record.PULLED)
    written = [progress for folder in folders if (progress := run_folder.read_progress(folder))]
    return written[0]["status"] if written else ""


def last_step(record: RunRecord) -> str:
    """The last whole line of the run's metrics, where they are on this machine or were fetched; else ""."""
    path = run_record.metrics_of(RUNS / record.run_id)
    newest = run_folder.newest_metrics(path)
    if not newest:
        return ""
    reward = newest[-1].get("reward/mean")
    return f"{newest[-1]['step']}" + (f", reward {reward:.2f}" if reward is not None else "")


def expectation(record: RunRecord) -> str:
    """How the run compares with what its recipe expects; "" where nothing is expected or measured.

    Where the run's files are not here, as for `last_step`.
    """
    path = run_record.metrics_of(RUNS / record.run_id)
    if path is None:
        return ""
    try:
        expected = load(path.with_name(run_folder.CONFIG)).expected
    except ConfigError:  # another version's: the trainer says what is wrong with it
        return ""
    if not expected.bands:  # most runs: their metrics need not be read
        return ""
    verdict = compare_with_bands(expected, sorted(run_folder.all_metrics(path), key=itemgetter("step")))
    return str(verdict) if verdict.last_step >= 0 else ""


def billed_lines(records: list[RunRecord]) -> list[str]:
    """What is billed now, per hour, and how to end it; [] where nothing is."""
    rates = {record.run_id: rate for record in records if (rate := record.usd_per_hour_now())}
    if not rates:
        return []
    by_run = ", ".join(f"{run} ${rate:.2f}" for run, rate in rates.items())
    text = (
        f"still costing ${sum(rates.values()):.2f} per hour ({by_run}): `python3 launch.py down RUN` ends one"
    )
    return ["", *textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)]
