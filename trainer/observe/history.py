"""Reads what `metrics.py` writes, and what the desk knows of a run. Standard library only: display and report
run without the training stack."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.config.run_folder import METRICS, metrics_of_line, parse_line, read_lines, write_whole

SLOWED = 8 | 32 | 64 | 128
"""Bits of a GPU's clocks' event reasons that stand for a fault (trainer/node/preflight/gpus.py)."""
PULLED = "pulled"
"""Folder of a run's record on the desk that its files are fetched into (recipes/drivers/fetched_runs.py)."""


def merge_lines(steps: dict[int, dict[str, Any]], lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Adds lines to the metrics per step, merging those of one step, and returns their records."""
    new = list(filter(None, map(metrics_of_line, lines)))
    for record in new:
        steps.setdefault(record["step"], {}).update(record)
    return new


def read_history(run_dir: str | Path) -> list[dict[str, Any]]:
    """Metrics per step of a run, in order of steps; [] where there is no metrics.jsonl yet."""
    path = Path(run_dir) / METRICS
    steps: dict[int, dict[str, Any]] = {}
    if path.exists():
        merge_lines(steps, path.read_bytes().splitlines(keepends=True))
    return [steps[step] for step in sorted(steps)]


def reproducible_part(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a line that equal runs share to the last bit: everything but `time/`, `perf/` and
    `fleet/`."""
    return {k: v for k, v in record.items() if not k.startswith(("time/", "perf/", "fleet/"))}


def truncate_metrics(path: Path, step: int) -> int:
    """Drops the lines of later steps and a torn last line, or everything where step <= 0; returns how
    many."""
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    keep = []
    for line in lines if step > 0 else []:
        record = parse_line(line)
        if record is not None and record["step"] <= step:
            keep.append(line)
    if len(keep) < len(lines):
        write_whole(path, b"".join(keep))
    return len(lines) - len(keep)


def last_step(path: Path, limit: int) -> int:
    """The last step in a file that is at most `limit`; -1 where there is none."""
    return max((r["step"] for r in read_lines(path) if r["step"] <= limit), default=-1)


def column(records: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """The values of one field, from the records that have it."""
    return [record[name] for record in records if name in record]


# --- what the desk knows of a run -----------------------------------------------------------------------


def run_name(folder: Path) -> str:
    """A run's id: that of its folder, or of the folder that it was pulled into."""
    return folder.absolute().parent.name if folder.name == PULLED else folder.absolute().name


def read_cost(folder: Path) -> dict[str, Any]:
    """`cost.json`, which the desk writes: usd, hours; planned_usd and planned_hours where there is a plan."""
    try:
        cost = json.loads((folder / "cost.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(cost, dict):
        return {}
    return {name: value for name, value in cost.items() if isinstance(value, int | float)}


def format_cost(folder: Path) -> str:
    """Dollars so far against those planned."""
    cost = read_cost(folder)
    if not cost.get("usd") and not cost.get("planned_usd"):
        return "–"
    planned = f" of {cost['planned_usd']:,.2f} planned" if cost.get("planned_usd") else ""
    return f"${cost['usd']:,.2f}{planned}"
