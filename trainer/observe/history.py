"""Reads what `metrics.py` writes.

Standard library only: display and report run without the training stack.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SLOWED = 8 | 32 | 64 | 128
"""Bits of a GPU's clocks' event reasons that stand for a fault (trainer/node/preflight/gpus.py)."""
STRAGGLES = 0.3
"""A rank straggles if the share of time that it waits in collectives is this much below the others'
median."""
TAIL_BYTES = 256 << 10
"""Bytes at the end of a file that hold the newest samples of some hundred nodes, or as many steps."""


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The records of one of the run's `.jsonl` files, a torn last line left out; [] where there is no
    file."""
    path = Path(path)
    if not path.exists():
        return []
    return [r for r in map(parse, path.read_bytes().splitlines(keepends=True)) if r is not None]


def merge_lines(steps: dict[int, dict[str, Any]], lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Adds lines to the metrics per step, merging those of one step, and returns their records.

    "NaN" and "Infinity" are floats again; a line that is torn or no record is passed over.
    """
    new = []
    for record in map(parse, lines):
        if record is not None:
            new.append({k: float(v) if isinstance(v, str) else v for k, v in record.items()})
            steps.setdefault(record["step"], {}).update(new[-1])
    return new


def read_history(run_dir: str | Path) -> list[dict[str, Any]]:
    """Metrics per step of a run, in order of steps; [] where there is no metrics.jsonl yet."""
    path = Path(run_dir) / "metrics.jsonl"
    steps: dict[int, dict[str, Any]] = {}
    if path.exists():
        merge_lines(steps, path.read_bytes().splitlines(keepends=True))
    return [steps[step] for step in sorted(steps)]


def read_progress(run_dir: str | Path) -> dict[str, Any]:
    """The content of `progress.json`, {} where there is none yet."""
    try:
        return json.loads((Path(run_dir) / "progress.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def newest_samples(run_dir: str | Path) -> list[dict[str, Any]]:
    """The newest samples of the nodes (trainer/observe/node_monitor.py), from the end of nodes.jsonl."""
    return newest_lines(Path(run_dir) / "nodes.jsonl")


def newest_lines(path: Path) -> list[dict[str, Any]]:
    """The records at the end of one of the run's `.jsonl` files, however long it is; [] where there is no
    file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return [s for line in file.read().splitlines(keepends=True) if (s := parse(line)) is not None]


def reproducible(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a line that equal runs share to the last bit: everything but `time/` and `perf/`."""
    return {k: v for k, v in record.items() if not k.startswith(("time/", "perf/"))}


def truncate(path: Path, step: int) -> int:
    """Drops the lines of later steps and a torn last line, or everything where step <= 0; returns how
    many."""
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    keep = []
    for line in lines if step > 0 else []:
        record = parse(line)
        if record is not None and record["step"] <= step:
            keep.append(line)
    if len(keep) < len(lines):
        replace(path, b"".join(keep))
    return len(lines) - len(keep)


def last_step(path: Path, limit: int) -> int:
    """The last step in a file that is at most `limit`; -1 where there is none."""
    return max((r["step"] for r in read_lines(path) if r["step"] <= limit), default=-1)


def parse(line: bytes) -> dict[str, Any] | None:
    """One line's record; None where it is torn or no record."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def replace(path: Path, data: bytes) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)
