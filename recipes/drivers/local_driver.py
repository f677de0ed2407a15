"""Drives a run on this machine: starts its task file, follows its log, ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from recipes.records import run_record
from recipes.records.run_process import PROCESS, process_of
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError
from trainer.config.run_folder import LAUNCH_LOG, PROGRESS, read_progress
from trainer.system import processes
from trainer.system.exit_codes import EXIT_INTERRUPTED

LOG = "local.log"
"""What a run prints that was left to itself."""
FOLLOW_S = 0.2


def up(record: RunRecord) -> int:
    """Becomes the run: its task file, in the foreground."""
    _note_process(record)
    os.execvp("bash", _task(record))


def start(record: RunRecord) -> int:
    """Starts the task file and leaves it to itself; its own process leads a group."""
    with (run_record.RUNS / record.run_id / LOG).open("wb") as log:
        process = subprocess.Popen(
            _task(record), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    _note_process(record, process.pid)
    return 0


def _task(record: RunRecord) -> list[str]:
    return ["bash", str(record.task_files()[0])]


def _note_process(record: RunRecord, pid: int = 0) -> None:
    (run_record.RUNS / record.run_id / PROCESS).write_text(f"{pid or os.getpid()}\n")


def logs(record: RunRecord) -> int:
    """Prints the end of a run's log, and what comes after it until the run has ended or Ctrl-C."""
    folder = run_record.RUNS / record.run_id
    files = [folder / name for name in (LAUNCH_LOG, LOG) if (folder / name).is_file()]
    if not files:
        raise ConfigError(f"{record.run_id} has printed nothing: {folder} has no {LAUNCH_LOG}")
    command = ["tail", "-n", "100", str(files[0])]
    if pid := process_of(record.run_id):
        command += ["-F", f"--pid={pid}", f"--sleep-interval={FOLLOW_S}"]
    try:
        return subprocess.run(command).returncode
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def down(record: RunRecord) -> int:
    """Asks the run's process to save and end. Raises ConfigError where a run says that it lives and no
    process of it can be told."""
    pid = process_of(record.run_id)
    if not pid:
        _check_silent(record.run_id)
        print(f"no process of {record.run_id} is left", file=sys.stderr)
        return 0
    group = os.getpgid(pid)
    try:
        if group == pid and group != os.getpgrp():
            os.killpg(group, signal.SIGTERM)
        else:
            os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        print(f"{record.run_id} has just ended", file=sys.stderr)
    return 0


def _check_silent(run_id: str) -> None:
    """Raises ConfigError where a run's files say that it goes on: then "nothing is left" would be a lie."""
    path = run_record.RUNS / run_id / PROGRESS
    progress = read_progress(path.parent)
    if progress.get("status") != "running":
        return
    if "pid_started" in progress and not processes.is_gone(progress):
        pid = progress.get("pid")
        machine = progress.get("pid_space", "another machine")
        raise ConfigError(
            f"{run_id} goes on: process {pid} of {machine} writes {path}, and it cannot be ended from here:"
            f" `kill {pid}` on that machine ends it"
        )
    silent_s = time.time() - path.stat().st_mtime
    if silent_s < 60 and "pid_started" not in progress:
        raise ConfigError(f"{run_id} goes on: {path} was written {silent_s:.0f} s ago by an unknown process")
