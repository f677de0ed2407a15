"""`alert`: tells a webhook or a command when a run ends for good, falls silent, trips a guard, or needs more
hours or dollars than nine in ten such runs. What was told is noted beside the run's record, and told once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

from recipes.drivers import fetched_runs
from recipes.records import run_record
from trainer.config import ConfigError
from trainer.config.run_folder import CONFIG, METRICS, newest_metrics, read_progress, write_whole
from trainer.system.terminal_text import terminal_line
from trainer.system.web_request import send_request

WEBHOOK = "SPOTRL_ALERT_WEBHOOK"
"""Variable with the webhook's address, which is a secret."""
SILENT_S = 900.0
"""A run that is said to be running and wrote nothing for so long is silent."""
TIMEOUT_S = 20.0


def watch_run(run: str, bucket: str, webhook: str, command: str, every_s: float, once: bool) -> int:
    """Tells what happens to a run until it ends. Returns 1 where something could not be told at the last
    look, else 0. Raises ConfigError where nothing is named that could be told."""
    webhook = webhook or os.environ.get(WEBHOOK, "")
    if not webhook and not command:
        raise ConfigError(f"nobody to tell: export {WEBHOOK}, or give --command")
    journal = run_record.RUNS / run / "alerts.json"
    while True:
        try:
            folder = fetched_runs.run_files(run, bucket)
        except SystemExit:  # nothing in its bucket: it has not begun, or it is none
            if once or not run_record.is_known(run):
                raise
            time.sleep(every_s)
            continue
        alerts, over = alerts_of_run(run, folder)
        known: list[str] = json.loads(journal.read_text()) if journal.is_file() else []
        failed = False
        for key, text in alerts.items():
            if key in known:
                continue
            try:
                _send(run, key.partition(" ")[0], f"{run}: {terminal_line(text)}", webhook, command)
            except (OSError, subprocess.SubprocessError) as error:
                print(f"alert not told, tried again: {error}", file=sys.stderr, flush=True)
                failed = True
                continue
            known.append(key)
            journal.parent.mkdir(parents=True, exist_ok=True)
            write_whole(journal, json.dumps(known).encode())
        if once or (over and not failed):
            return int(failed)
        time.sleep(every_s)


def alerts_of_run(run: str, folder: Path) -> tuple[dict[str, str], bool]:
    """All that is to be told of a run as its files stand, by a key that begins with its kind (ended, silent,
    guard, late, dear), and whether the run is over."""
    progress = read_progress(folder)
    alerts: dict[str, str] = {}
    if (folder / CONFIG).is_file():
        guards = [sys.executable, "-m", "trainer.observe.guards", str(folder)]
        done = subprocess.run(guards, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"{folder / CONFIG} cannot be read: {done.stderr.strip().splitlines()[-1]}")
        for guard, text in json.loads(done.stdout):
            alerts.setdefault(f"guard {guard}", text)
    record = run_record.load_record(run) if run_record.is_known(run) else None
    if record and 0 < record.planned_most_hours < record.hours():
        most = f"nine in ten such runs end within {record.planned_most_hours:.1f}"
        alerts["late"] = f"{record.hours():.1f} hours, and {most}"
    if record and 0 < record.planned_most_usd < record.usd():
        most = f"nine in ten such runs cost at most ${record.planned_most_usd:,.0f}"
        alerts["dear"] = f"${record.usd():,.0f}, and {most}"

    status, message = progress.get("status", "running"), progress.get("message", "")
    if status != "running":
        alerts[f"ended {status}"] = f"{status}{f': {message}' if message else ''}"
        return alerts, True
    newest = newest_metrics(folder / METRICS)[-1:]
    steps = [metrics["time/unix_s"] for metrics in newest if "time/unix_s" in metrics]
    since = max([0.0, progress.get("phase_since_unix_s", 0.0), *steps])
    if since and time.time() - since > SILENT_S:
        minutes = (time.time() - since) / 60
        alerts[f"silent {since:.0f}"] = f"silent for {minutes:.0f} minutes {message}".rstrip()
    return alerts, bool(record and record.ended_s)


def _send(run: str, kind: str, text: str, webhook: str, command: str) -> None:
    """Posts the text as Slack takes it, and runs the command with it. Raises OSError, SubprocessError."""
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
        env = os.environ | {"RUN_ID": run, "ALERT": kind, "ALERT_TEXT": text.partition(": ")[2]}
        subprocess.run(["bash", "-c", command], env=env, check=True, timeout=TIMEOUT_S * 3)
    print(f"told: {text}", flush=True)
