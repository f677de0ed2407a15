"""`alert`: tells a webhook or a command when a run ends for good, falls silent, trips a guard, or needs
more hours or dollars than nine in ten such runs.

It reads what `status` reads, so it can run on any desk, or every few minutes in cron with --once: what was
told is noted beside the run's record, and told once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipes.drivers import fetched_runs
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError
from trainer.config.run_folder import CONFIG, METRICS, newest_metrics, read_progress, write_whole
from trainer.system.terminal_text import terminal_line
from trainer.system.web_request import send_request

WEBHOOK = "SPOTRL_ALERT_WEBHOOK"
"""Variable with the webhook's address, which is a secret."""
TOLD = "alerts.json"
"""What was told of a run, by kind, beside its record."""
SILENT_S = 900.0
"""A run that is said to be running and wrote nothing for so long is silent."""
TIMEOUT_S = 20.0
Tell = Callable[[str, str, str], None]
"""Takes run, kind and text. Raises OSError where it cannot be told."""


@dataclass(frozen=True)
class Alert:
    key: str
    """Told once."""
    kind: str
    """ended, silent, guard, late or dear."""
    text: str


def watch_run(run: str, bucket: str, webhook: str, command: str, every_s: float, once: bool) -> int:
    """Tells what happens to a run until it ends. Returns 1 where something could not be told at the last
    look, else 0. Raises ConfigError where nothing is named that could be told."""
    webhook = webhook or os.environ.get(WEBHOOK, "")
    if not webhook and not command:
        raise ConfigError(f"nobody to tell: export {WEBHOOK}, or give --command")
    journal = run_record.RUNS / run / TOLD
    while True:
        try:
            folder = fetched_runs.run_files(run, bucket)
        except SystemExit:  # nothing in its bucket: it has not begun, or it is none
            if once or not run_record.is_known(run):
                raise
            time.sleep(every_s)
            continue
        alerts, over = alerts_of_run(run, folder)
        failed = False
        for alert in _new(alerts, journal):
            alert = replace(alert, text=terminal_line(alert.text))
            try:
                send_alert(run, alert, webhook, command)
            except (OSError, subprocess.SubprocessError) as error:
                print(f"alert not told, tried again: {error}", file=sys.stderr, flush=True)
                failed = True
                continue
            _note(alert, journal)
        if once or (over and not failed):
            return int(failed)
        time.sleep(every_s)


def alerts_of_run(run: str, folder: Path) -> tuple[list[Alert], bool]:
    """All that is to be told of a run as its files stand, and whether it is over."""
    progress = read_progress(folder)
    record = run_record.load_record(run) if run_record.is_known(run) else None
    alerts = [*_guards(folder), *_limits(record)]
    status = progress.get("status", "running")
    message = progress.get("message", "")
    if status != "running":
        alerts.append(Alert(f"ended {status}", "ended", f"{status}{f': {message}' if message else ''}"))
        return alerts, True
    since = _last_sign(folder, progress)
    if since and time.time() - since > SILENT_S:
        minutes = (time.time() - since) / 60
        alerts.append(
            Alert(f"silent {since:.0f}", "silent", f"silent for {minutes:.0f} minutes {message}".rstrip())
        )
    return alerts, bool(record and record.ended_s)


def _guards(folder: Path) -> list[Alert]:
    """The guards that the steps have tripped, by the run's own limits."""
    if not (folder / CONFIG).is_file():
        return []
    command = [sys.executable, "-m", "trainer.observe.guards", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{folder / CONFIG} cannot be read: {done.stderr.strip().splitlines()[-1]}")
    return [Alert(f"guard {guard}", "guard", text) for guard, text in json.loads(done.stdout)]


def _limits(record: RunRecord | None) -> list[Alert]:
    """Hours and dollars beyond what nine in ten such runs need."""
    if record is None:
        return []
    found = []
    hours, usd = record.hours(), record.usd()
    if record.planned_most_hours and hours > record.planned_most_hours:
        text = f"{hours:.1f} hours, and nine in ten such runs end within {record.planned_most_hours:.1f}"
        found.append(Alert("late", "late", text))
    if record.planned_most_usd and usd > record.planned_most_usd:
        text = f"${usd:,.0f}, and nine in ten such runs cost at most ${record.planned_most_usd:,.0f}"
        found.append(Alert("dear", "dear", text))
    return found


def _last_sign(folder: Path, progress: dict[str, Any]) -> float:
    """Unix time of the newest thing that the run has written of itself; 0 where it wrote nothing."""
    newest = newest_metrics(folder / METRICS)[-1:]
    steps = [metrics["time/unix_s"] for metrics in newest if "time/unix_s" in metrics]
    return max([0.0, progress.get("phase_since_unix_s", 0.0), *steps])


def send_alert(run: str, alert: Alert, webhook: str, command: str) -> None:
    """Posts the alert as Slack takes it, and runs the command with it. Raises OSError, SubprocessError."""
    text = f"{run}: {alert.text}"
    if webhook:
        body = json.dumps({"text": text}).encode()
        headers = {"Content-Type": "application/json"}
        try:
            send_request(webhook, method="POST", body=body, headers=headers, timeout_s=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise OSError(f"the webhook answered {error.code}") from None
        except ConfigError:  # its address is not one, and is a secret
            raise ConfigError(f"{WEBHOOK} is no address: https://hooks.slack.com/...") from None
    if command:
        env = os.environ | {"RUN_ID": run, "ALERT": alert.kind, "ALERT_TEXT": alert.text}
        subprocess.run(["bash", "-c", command], env=env, check=True, timeout=TIMEOUT_S * 3)
    print(f"told: {text}", flush=True)


def _new(alerts: list[Alert], journal: Path) -> list[Alert]:
    """Those that were not told before, one of a key."""
    known = set(json.loads(journal.read_text())) if journal.is_file() else set()
    found: dict[str, Alert] = {}
    for alert in alerts:
        if alert.key not in known:
            found.setdefault(alert.key, alert)
    return list(found.values())


def _note(alert: Alert, journal: Path) -> None:
    known = json.loads(journal.read_text()) if journal.is_file() else []
    journal.parent.mkdir(parents=True, exist_ok=True)
    write_whole(journal, json.dumps([*known, alert.key]).encode())
