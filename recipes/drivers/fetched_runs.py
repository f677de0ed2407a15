"""Sight of a run from the desk: its files are read where they are here, else fetched from its bucket.

Fetching needs obstore (the environment `desk`, a second to make); display and report run under this very
Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from recipes.drivers import bucket_access, launch_tokens, launched_run
from recipes.records import run_record
from recipes.records.run_record import PULLED, RunRecord
from trainer.config import ConfigError
from trainer.config.run_folder import CONFIG, METRICS, PROGRESS, RUNNING, read_progress
from trainer.config.run_store import EXPORTED, RunStore
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED

BUCKET = "bucket"
"""File beside what was fetched: the bucket that it came from, where the run was not launched from here."""
EVERY_S = 10.0
"""Between two looks into the bucket."""


def run_files(run: str, bucket: str = "") -> Path:
    """The folder with a run's files, fetched where a bucket is named or they are not here. Raises ConfigError
    where there are none, SystemExit where the bucket has none, even if older files were fetched from another
    one."""
    for path in (Path(run), run_record.RUNS / run):
        if not bucket and ((path / METRICS).exists() or (path / CONFIG).exists()):
            return path
    url = url_of(run, bucket)
    folder = run_record.RUNS / run / PULLED
    if not url:
        raise ConfigError(
            f"no run at {run}: give the id or the folder of a run, and --bucket for one that was not launched"
            " from here"
        )
    code = call_mirror("pull", url, folder)
    if code == EXIT_CONFIG or (code and not (folder / METRICS).exists()):
        raise SystemExit(code)
    if code:
        print(f"{url} does not answer: this is what was fetched before", file=sys.stderr, flush=True)
    else:
        remember_bucket(run, bucket)
    return folder


def remember_bucket(run: str, bucket: str) -> None:
    """Notes where a run that was not launched from here lies, so that its id is enough from now on."""
    if bucket and not run_record.is_known(run):
        (run_record.RUNS / run / PULLED / BUCKET).write_text(bucket + "\n")


def remembered_buckets() -> dict[str, str]:
    """Run -> bucket of the runs that were fetched and not launched from here."""
    notes = sorted(run_record.RUNS.glob(f"*/{PULLED}/{BUCKET}"))
    return {note.parents[1].name: note.read_text().strip() for note in notes}


def url_of(run: str, bucket: str = "") -> str:
    """Where a run's files are in its bucket; "" for a run without one."""
    if not bucket:
        bucket = (
            run_record.load_record(run).bucket
            if run_record.is_known(run)
            else remembered_buckets().get(run, "")
        )
    return RunStore.in_bucket(bucket, run).root if bucket else ""


def known_url(run: str, bucket: str = "") -> str:
    """Where a run's files are in its bucket. Raises ConfigError for an id that nobody here knows, and for a
    run without a bucket."""
    url = url_of(run, bucket)
    if url:
        return url
    if run_record.is_known(run):
        raise ConfigError(f"{run} has no bucket that this machine knows of: give --bucket")
    known = ", ".join(run_record.known_ids()) or "none"
    raise ConfigError(
        f"no run {run} was launched from here (known: {known}): give --bucket for one of another desk"
    )


def call_mirror(*words: str | Path) -> int:
    """Runs trainer/observe/mirror.py; returns its exit code."""
    return subprocess.run(_mirror(*words), env=_env()).returncode


def _mirror(*words: str | Path) -> list[str]:
    return [bucket_access.find_python(), "-m", "trainer.observe.mirror", *map(str, words)]


def _env() -> dict[str, str]:
    return os.environ | launch_tokens.find_tokens() | launch_tokens.find_settings()


def pull_run(run: str, bucket: str, weights: bool) -> int:
    """Fetches metrics, samples, log and configuration; the exported weights on request."""
    url = known_url(run, bucket)
    folder = run_record.RUNS / run / PULLED
    code = call_mirror("pull", url, folder, *(["--weights"] if weights else []))
    if not code:
        remember_bucket(run, bucket)
        print(folder)
    return code


def list_runs(bucket: str) -> int:
    """Lists the runs of a bucket; of the buckets that this desk knows where none is named. Raises
    ConfigError."""
    known = {record.bucket for record in run_record.known_records()} | set(remembered_buckets().values())
    buckets = [bucket] if bucket else sorted(known - {""})
    if not buckets:
        raise ConfigError("no run was launched from here into a bucket: give --bucket")
    worst = 0
    for url in buckets:
        print(f"{url}:", flush=True)
        worst = call_mirror("runs", url) or worst
    return worst


def profile_run(run: str, bucket: str, fetch: bool) -> int:
    """Asks a running run for a profile of its next step, or fetches those that it has taken."""
    here = run_record.RUNS / run
    if not bucket and (here / PROGRESS).exists():
        if not fetch and read_progress(here).get("status") != RUNNING:
            raise ConfigError(f"{run} is over: set logging.profile_step and start it again")
        if not fetch:
            (here / "profile.request").touch()
        print(f"{here / 'profile'}" + ("" if fetch else ": the next step is profiled"))
        return 0
    url = known_url(run, bucket)
    return call_mirror("profile", url, here / PULLED, *(["--fetch"] if fetch else []))


def show_now(run: str, bucket: str = "") -> int:
    """Shows where a run stands: step, phase, reward, speed, nodes."""
    try:
        folder = run_files(run, bucket)
    # launched from here, without bucket, on machines of its own: its platform knows, we do not
    except ConfigError:
        return 0
    except SystemExit as refused:  # the mirror has said why
        has_not_begun = run_record.is_known(run) and not bucket
        return 0 if has_not_begun else int(refused.code or 0)
    return subprocess.run([sys.executable, "-m", "trainer.observe.live", str(folder), "--once"]).returncode


def watch_run(run: str, bucket: str) -> int:
    """The same, live, until the run ends or Ctrl-C."""
    folder = run_files(run, bucket)
    fetching = None
    if folder.name == PULLED:
        command = _mirror("pull", url_of(run, bucket), folder, "--every", str(EVERY_S))
        fetching = subprocess.Popen(command, env=_env(), stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return subprocess.run([sys.executable, "-m", "trainer.observe.live", str(folder)]).returncode
    finally:
        if fetching:
            fetching.terminate()
            fetching.wait()


def show_logs(run: str, bucket: str, stored: bool, worker: int = 0) -> int:
    """Follows a run's log through its platform; from the bucket where that cannot, is over, or --stored asks
    for it. worker: that of a machine that samples for it, from 1 on. Raises ConfigError without one."""
    if worker:
        jobs = [(record, job) for record in run_record.workers_of(run) for job in range(record.jobs)]
        if not 1 <= worker <= len(jobs):
            raise ConfigError(f"--worker {worker}: {len(jobs)} machines were started from here for {run}")
        record, job = jobs[worker - 1]
        return launched_run.drive_run(record.run_id, "logs", job=job)
    if stored or bucket or not run_record.is_known(run):
        url = known_url(run, bucket)
        return call_mirror("logs", url, run_record.RUNS / run / PULLED, "--follow")
    url = url_of(run)
    if not (url and run_record.load_record(run).ended_s):
        try:
            code = launched_run.drive_run(run, "logs")
        except ConfigError:  # the platform's program is not installed here
            if not url:
                raise
            code = EXIT_CONFIG
        if not url or code in (0, EXIT_INTERRUPTED):
            return code
    print(f"the platform has no log of {run} any more: this one is from {url}", file=sys.stderr, flush=True)
    return call_mirror("logs", url, run_record.RUNS / run / PULLED, "--follow")


def write_report(runs: list[str], bucket: str) -> int:
    """One HTML file of a run, or of several over each other."""
    out = run_record.RUNS / f"report-{'-'.join(Path(run).name for run in runs)[:100]}.html"
    return _over_runs("report", runs, bucket, ["--out", str(out)])


def compare_runs(runs: list[str], bucket: str, expected: bool) -> int:
    """Where one run left what was expected of it, or where two part. Returns 1 where they do."""
    return _over_runs("compare", runs, bucket, ["--expected"] if expected else [])


def _over_runs(program: str, runs: list[str], bucket: str, options: list[str]) -> int:
    """Runs a program of trainer/observe over the runs' folders, each with the dollars that this desk knows
    of."""
    try:
        folders = [run_files(run, bucket) for run in runs]
    except SystemExit as refused:  # the mirror has said why
        return int(refused.code or 0)
    for run, folder in zip(runs, folders, strict=True):
        if run_record.is_known(run):
            _note_costs(run, folder)
    command = [sys.executable, "-m", f"trainer.observe.{program}", *map(str, folders), *options]
    return subprocess.run(command).returncode


def publish_run(run: str, bucket: str, to: str, scores: str, flags: list[str]) -> int:
    """Publishes the weights of a run with its card; fetches them first where they are not here. scores: the
    evaluation whose scores the card has."""
    folder = run_files(run, bucket)
    missing = not (folder / EXPORTED).exists() and url_of(run, bucket)
    if missing and (code := pull_run(run, bucket, weights=True)):
        return code
    if run_record.is_known(run):
        _note_costs(run, folder)
    command = [bucket_access.find_python(), "-m", "trainer.observe.publish", str(folder), "--to", to, *flags]
    command += ["--weights", str(folder / EXPORTED)]
    if scores:
        command += ["--scores", str(run_files(scores) / "benchmarks.json")]
    return subprocess.run(command, env=_env()).returncode


def _note_costs(run: str, folder: Path) -> None:
    (folder / "cost.json").write_text(json.dumps(run_costs(run_record.load_record(run))))


def run_costs(record: RunRecord) -> dict[str, float]:
    """Dollars and hours of a run: so far, and of the whole run as planned at the launch, where prices were
    known."""
    costs = {"usd": record.usd(), "hours": record.hours(), "unix_s": time.time()}
    if (answer := launched_run.ask_platform(record)) and answer.usd is not None:
        costs["usd"] = record.earlier_usd + answer.usd
    if record.planned_usd:
        costs |= {"planned_usd": record.planned_usd, "planned_hours": record.planned_hours}
    return costs
