"""Units that the trainer waits for, and what came of them."""

from __future__ import annotations

from trainer.algorithm.traces import Trace
from trainer.fleet.units import RolloutUnit


class UnitResults:
    """Every unit from when it is added until its samples are taken."""

    def __init__(self) -> None:
        self.units: dict[str, RolloutUnit] = {}
        self.samples: dict[str, list[Trace]] = {}
        """What was sampled of the units that are finished."""
        self.refusals: dict[str, list[str]] = {}
        """Workers whose samples of a unit were refused, one for each time."""

    def keep(self, unit: str, traces: list[Trace]) -> None:
        """Keeps the samples of a unit until they are taken."""
        self.refusals.pop(unit, None)
        self.samples[unit] = traces

    def count_refusal(self, unit: str, worker: str) -> None:
        """Takes note that a worker's samples of a unit were refused."""
        self.refusals.setdefault(unit, []).append(worker)

    def take(self, unit: str) -> list[Trace]:
        """Forgets a unit; returns its samples."""
        self.units.pop(unit)
        return self.samples.pop(unit)
