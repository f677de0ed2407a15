"""Why a run ended: in its own words where its files are on this machine, else in those of its exit code."""

from __future__ import annotations

from operator import itemgetter

from recipes.records import run_record
from recipes.records.run_record import PULLED
from trainer.config import run_folder
from trainer.config.run_folder import LAUNCH_LOG
from trainer.system.exit_codes import describe_code
from trainer.system.terminal_text import terminal_line

LOGS = (LAUNCH_LOG, f"{PULLED}/{LAUNCH_LOG}", "slurm.log", "pbs.log", "local.log")
ERRORS = ("error: ", "launch.py: ")
"""Beginnings of the lines in which a program says why it ended."""


def describe_end(run_id: str, code: int, since_unix_s: float) -> str:
    """An exit code with the reason that the run gave, or with what such a code means. since_unix_s: of the
    launch; what an earlier one left says nothing."""
    words = own_words(run_id, since_unix_s)
    return f"exit code {code}: {words}" if words else describe_code(code)


def own_words(run_id: str, since_unix_s: float = 0.0) -> str:
    """The reason of its end that the run wrote, or that the newest log names; "" where neither does."""
    for folder in (run_record.RUNS / run_id, run_record.RUNS / run_id / PULLED):
        progress = run_folder.read_progress(folder)
        if progress.get("why") and progress.get("ended_unix_s", 0.0) >= since_unix_s:
            return terminal_line(progress["why"])
    return logged_error(run_id, since_unix_s)


def logged_error(run_id: str, since_unix_s: float = 0.0) -> str:
    """The last error that the newest log names; "" without one."""
    for lines in _newest_logs(run_id, since_unix_s):
        for line in reversed(lines):
            for beginning in ERRORS:
                if line.lstrip().startswith(beginning):
                    return terminal_line(line.lstrip().removeprefix(beginning))
    return ""


def last_words(run_id: str) -> str:
    """Why a run ended as far as its files tell, else the last line of its newest log that is no step of
    training."""
    words = own_words(run_id)
    for lines in [] if words else _newest_logs(run_id, 0.0):
        others = [line for line in lines if not line.startswith("step ")]
        words = words or terminal_line(others[-1] if others else "")
    return words


def _newest_logs(run_id: str, since_unix_s: float) -> list[list[str]]:
    """The lines at the end of each log that is here, the newest log first."""
    logs = []
    for name in LOGS:
        path = run_record.RUNS / run_id / name
        if path.is_file() and path.stat().st_mtime >= since_unix_s:
            lines = run_folder.file_tail(path).decode(errors="replace").strip().splitlines()
            logs.append((path.stat().st_mtime, lines))
    return [lines for _, lines in sorted(logs, key=itemgetter(0), reverse=True) if lines]
