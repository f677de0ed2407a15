"""Seconds from a launch to a run's first step: as runs launched from here took on a target, else an assumption."""

from __future__ import annotations

import functools
import json
import statistics

from recipes import run_record

BOOT_S = 480.0
"""Machines, environment and engine start, where no run has measured it (assumption)."""
LONGEST_S = 2 * 3600.0
"""Above it machines were waited for, or data prepared."""


@functools.cache
def seconds(target: str) -> tuple[float, int]:
    """(seconds, runs that measured them): their median; the model's download is part of it. (BOOT_S, 0) without any."""
    found = [took for name in run_record.names() if (took := _of(name, target)) is not None]
    return (statistics.median(found), len(found)) if found else (BOOT_S, 0)


def setup() -> tuple[float, float, int]:
    """(seconds, bytes, runs) of the environment's set-up on nodes of runs launched here: medians, 0 without any."""
    told = [told for name in run_record.names() if (told := run_record.setup_of(run_record.RUNS / name))]
    seconds, received = ([t[key] for t in told] or [0.0] for key in ("seconds", "bytes"))
    return statistics.median(seconds), statistics.median(received), len(told)


def _of(name: str, target: str) -> float | None:
    """Of one run: its launch to the begin of its first step, from its metrics where they are here or were fetched."""
    try:
        record = run_record.load(name)
        path = run_record.metrics_of(run_record.RUNS / name)
        lines = (json.loads(line) for line in path.read_text().splitlines()) if path else iter(())
        first = next(line for line in lines if line.get("step") == 1)
        took = first["time/unix_s"] - first["time/step_s"] - record.started_s
    except (OSError, ValueError, KeyError, TypeError, StopIteration):  # another format, or nothing to measure yet
        return None
    return took if record.target == target and 0 < took < LONGEST_S else None
