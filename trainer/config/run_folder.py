"""The folder of a run: what its files are called, and how they are written and read while others do so too.

The trainer writes it; the display, the report, `status` and the launchers read it, on this machine or from a
copy of it. Standard library only, so that a desk without the training stack can read a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.system import processes

METRICS = "metrics.jsonl"
"""One line per step."""
SAMPLES = "samples.jsonl"
"""Some of the completions with their grades."""
SAMPLE_IMAGES = "samples"
"""Folder of their images, each named by its content."""
NODES = "nodes.jsonl"
"""Samples of the nodes' GPUs, disks and memory."""
ATTEMPTS = "attempts.jsonl"
"""One line per start of the trainer."""
PROGRESS = "progress.json"
"""The phase that runs right now."""
ROSTER = "fleet.json"
"""The rollout workers that were seen, and what became of each."""
CONFIG = "config.yaml"
"""The resolved configuration."""
LAUNCH_LOG = "launch.log"
"""What the job printed."""
LAUNCH = "launch.json"
"""The desk's record of the launch."""
MANIFEST = "manifest.json"
"""What the run was made from."""
REPORT = "report.html"
GPU_CHECK = "gpu-check.json"
"""What a check of a card found: figures beside their plan, and how each check ended."""
GPU_CHECK_PAGE = "gpu-check.md"
"""The same, to be read."""

RUNNING, DIED = "running", "died"
SERVING = "serving"
"""The state of a server that answers."""
LEARNING, SAMPLING = "learning", "sampling"
"""The lanes of a run, where sampling and learning do not take turns."""
WORDS = ("status", "phase", "message", "restarts", "why", "pid_space")
"""Fields of the progress file that are text; all others are numbers."""
MOST = 1e15
"""No count and no time of a run is as large."""
MOST_STEPS = 10**12
"""No run has as many; a line with such a step is none of a run's."""
MOST_S = 1e11
"""No time of a run is later, in seconds since 1970."""
TAIL_BYTES = 256 << 10
"""Read from the end of a file: the newest samples of some hundred nodes, or metrics of as many steps."""


# --- writing ----------------------------------------------------------------------------------------------


def write_whole(path: Path, data: bytes, private: bool = False) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part. private: nobody but its
    owner may read it."""
    # Nodes may share the disk, and threads the process.
    writer = f"{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}"
    temporary = path.with_name(f".{path.name}.{writer}")
    try:
        mode = 0o600 if private else 0o666
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:  # a full disk, say
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_roster(folder: Path) -> list[dict[str, Any]]:
    """The rollout workers of a run; [] where it has none, or none was seen yet."""
    try:
        workers = json.loads((folder / ROSTER).read_text())["workers"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return workers if isinstance(workers, list) else []


# --- lines that a kill may have torn ----------------------------------------------------------------------


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line with its line feed; None where the line is torn or holds no record."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def metrics_of_line(line: bytes) -> dict[str, Any] | None:
    """The metrics of a step that a line holds; None where the line is torn or names no step. "NaN" and
    "Infinity" are floats again. A value that is no number, or no time, is passed over."""
    record = parse_line(line) or {}
    step = record.pop("step", None)
    if type(step) is not int or not 0 <= step < MOST_STEPS:
        return None
    metrics: dict[str, Any] = {"step": step}
    for name, value in record.items():
        number = _number(value)
        if number is None or (name.startswith("time/") and not 0 <= number < MOST_S):
            continue
        metrics[name] = number
    return metrics


def _number(value: Any) -> int | float | None:
    """The number that a line holds; None for anything else, and for one that no float holds."""
    try:
        number = float(value) if isinstance(value, str | int | float) else None
    except (ValueError, OverflowError):
        return None
    return value if type(value) is int else number


def newest_metrics(path: Path | None) -> list[dict[str, Any]]:
    """The metrics of the newest steps, however long the file is; [] where there is none."""
    if path is None or not path.exists():
        return []
    return list(filter(None, map(metrics_of_line, file_tail(path).splitlines(keepends=True))))


def all_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics of all lines, as they were written; [] where there is no file."""
    if not path.exists():
        return []
    return list(filter(None, map(metrics_of_line, path.read_bytes().splitlines(keepends=True))))


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The records of a `.jsonl` file, torn lines left out; [] where there is no file."""
    path = Path(path)
    if not path.exists():
        return []
    return _records(path.read_bytes())


def newest_lines(path: str | Path) -> list[dict[str, Any]]:
    """The records at the end of a `.jsonl` file, however long it is; [] where there is no file."""
    path = Path(path)
    return _records(file_tail(path)) if path.exists() else []


def file_tail(path: Path) -> bytes:
    """The last TAIL_BYTES of a file, or all of a shorter one."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read()


def _records(data: bytes) -> list[dict[str, Any]]:
    parsed = [parse_line(line) for line in data.splitlines(keepends=True)]
    return [record for record in parsed if record is not None]


# --- what the run says of itself --------------------------------------------------------------------------


def read_progress(run_dir: str | Path) -> dict[str, Any]:
    """The content of `progress.json`; {} where there is none yet. A run whose process was killed cannot say
    so: where its process was one of this machine and is gone, `status` is `died`."""
    progress = written_progress(run_dir)
    if progress.get("status") in (RUNNING, SERVING) and "pid" in progress and processes.is_gone(progress):
        progress |= {"status": DIED, "phase": DIED}
    return progress


def written_progress(run_dir: str | Path) -> dict[str, Any]:
    """What a run has written into `progress.json`, as far as it is of its kind; {} where there is none."""
    try:
        content = json.loads((Path(run_dir) / PROGRESS).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    progress = _of_their_kind(content)
    if "status" not in progress:
        return {}
    if isinstance(content.get("lanes"), dict):
        progress["lanes"] = {name: _of_their_kind(lane) for name, lane in content["lanes"].items()}
    return progress


def _of_their_kind(content: Any) -> dict[str, Any]:
    """The words and finite numbers of a progress file."""
    kept = {}
    for name, value in content.items() if isinstance(content, dict) else ():
        if name in WORDS:
            fits = isinstance(value, str)
        else:
            fits = type(value) in (int, float) and abs(value) < MOST
        if fits:
            kept[name] = value
    return kept


@dataclass(frozen=True)
class LaneProgress:
    """Where one lane of a run is."""

    name: str
    """Empty where the run has one lane."""
    step: int
    phase: str
    since_unix_s: float
    """When the phase began."""


def lane_progress(progress: Mapping[str, Any]) -> list[LaneProgress]:
    """Where each lane is, by what `read_progress` gave; the learning lane first. [] before a run's start."""
    if "phase" not in progress:
        return []
    if progress.get("status") == RUNNING and "lanes" in progress:
        states = progress["lanes"]
    else:
        states = {"": progress}
    return [
        LaneProgress(name, state.get("step", 0), state.get("phase", ""), state.get("phase_since_unix_s", 0.0))
        for name, state in states.items()
    ]
