"""Seconds from a launch to a run's first step: as runs launched from here took on a target, else an
assumption."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass

from recipes.records import run_record
from trainer.config import run_folder

MACHINE_S = 90.0
ENVIRONMENT_S = 270.0
START_S = 120.0
"""Until a machine runs our commands, its environment is there, and Ray, engine and policy stand
(assumptions)."""
BOOT_S = MACHINE_S + ENVIRONMENT_S + START_S
"""All of it, where no run has measured it."""
LONGEST_S = 2 * 3600.0
"""Above it machines were waited for, or data prepared."""


@dataclass(frozen=True)
class Restart:
    """Seconds from a launch or a preemption to the next step, by part. Weights are downloaded during the
    start."""

    base_weights: float
    """Download of the model; 0 where the checkpoint holds all that is needed."""
    checkpoint: float
    """Its download on a new machine; 0 for a first start."""
    measured: float = 0.0
    """Launch to first step of earlier runs, with the model's download; 0: none."""

    def total(self) -> float:
        if self.measured:
            return self.measured + self.checkpoint
        weights = max(START_S, self.base_weights + self.checkpoint)
        return MACHINE_S + ENVIRONMENT_S + weights

    def __str__(self) -> str:
        if self.measured:
            return f"{self.total():.0f} s, {self.measured:.0f} of them as runs launched from here took"
        base = f"base weights {self.base_weights:.0f}" if self.base_weights else "no base weights"
        return (
            f"{self.total():.0f} s = machine {MACHINE_S:.0f} + environment {ENVIRONMENT_S:.0f} + the longer"
            f" of start {START_S:.0f} and {base} + checkpoint {self.checkpoint:.0f}"
        )


@functools.cache
def start_seconds(target: str) -> tuple[float, int]:
    """(seconds, runs that measured them): their median; the model's download is part of it. (BOOT_S, 0)
    without any."""
    found = []
    for name in run_record.known_ids():
        took = _of(name, target)
        if took is not None:
            found.append(took)
    return (statistics.median(found), len(found)) if found else (BOOT_S, 0)


def _of(name: str, target: str) -> float | None:
    """Seconds from a run's launch to the start of its first step, by its metrics; None where they are neither
    here nor fetched, or where the run is no example of such a start."""
    try:
        record = run_record.load_record(name)
        path = run_record.metrics_of(run_record.RUNS / name)
        lines = run_folder.read_lines(path) if path else []
        first = next(line for line in lines if line.get("step") == 1)
        took = first["time/unix_s"] - first["time/step_s"] - record.started_s
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        # The files are of another format, or there is nothing to measure yet.
        return None
    return took if record.target == target and 0 < took < LONGEST_S else None
