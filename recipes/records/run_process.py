"""The process of a run on this machine, for all who ask whether it lives.

A start leaves its process id in the run's folder, the launcher and the driver leave theirs. An id alone may
be another process by now, so one counts only if its environment has this run's id.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from recipes.records import run_record
from trainer.config.run_folder import CONFIG, read_progress
from trainer.system import processes

PROCESS = "local.pid"
"""Names the process that the run's task file was started as."""
GOING_DOWN_S = 5.0
"""Until the processes of a killed run are gone: a second start in that time resumes it."""
LOCK = ".launcher.lock"
"""Names the process of the run's launcher (trainer/node/watch/run_lock.py)."""


def process_of(run_id: str) -> int:
    """The process of a run on this machine: that of its start, else that of its launcher or driver, which a
    person may have started by hand; 0 where none is left."""
    folder = run_record.RUNS / run_id
    candidates = [_number(folder / PROCESS), _holder(folder / LOCK), _driver(folder)]
    return next((pid for pid in candidates if pid and _is_of_run(pid, run_id)), 0)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _holder(path: Path) -> int:
    try:
        pid = json.loads(path.read_text())["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return pid if isinstance(pid, int) else 0


def _driver(folder: Path) -> int:
    pid = read_progress(folder).get("pid", 0)
    return pid if isinstance(pid, int) else 0


def _is_of_run(pid: int, run_id: str) -> bool:
    """Whether a process lives and its environment has this run's id."""
    if processes.has_ended(pid):
        return False
    try:
        return f"RUN_ID={run_id}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def interrupted_run(recipe: str, target: str, overrides: list[str], model: str) -> str:
    """The newest run of this very recipe and model that neither finished nor is running now; empty if there
    is none. One that was killed before its trainer began counts: its preparation goes on where it was."""
    for record in run_record.newest_first():
        if (record.recipe, record.target, record.overrides) != (recipe, target, overrides):
            continue
        progress = read_progress(run_record.RUNS / record.run_id)
        if progress.get("status") == "finished":
            return ""
        if progress and model not in _config_text(record.run_id):
            continue
        if _have_ended(record.run_id, progress):
            return record.run_id
    return ""


def _config_text(run_id: str) -> str:
    try:
        return (run_record.RUNS / run_id / CONFIG).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _have_ended(run_id: str, progress: dict[str, Any]) -> bool:
    """Whether a run's processes have ended; waits GOING_DOWN_S for one that was killed just now."""
    until = time.monotonic() + GOING_DOWN_S
    while process_of(run_id) or _writes_still(progress):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _writes_still(progress: dict[str, Any]) -> bool:
    """Whether the process that wrote a run's progress lives. The id alone is asked too: a run of an earlier
    version wrote no more."""
    pid = progress.get("pid")
    return isinstance(pid, int) and not processes.is_gone(progress) and bool(processes.process_state(pid))
