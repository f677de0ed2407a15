"""What a head counts of its workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

OWN = "own"
"""The trainer's own engines, among the devices that sample."""


@dataclass
class Counts:
    """Since the start of this process."""

    units: int = 0
    own: int = 0
    """Units that the trainer's own engines sampled."""
    late: int = 0
    refused: int = 0
    forged: int = 0
    turned_away: int = 0
    """Workers that were told to end: for their probe, or since their samples were refused or of no use."""
    by_worker: dict[str, int] = field(default_factory=dict)
    """Completions of every worker that were accepted."""
    by_device: dict[str, int] = field(default_factory=dict)
    """Completions that were accepted since the last step was logged, by what sampled them."""
    worker_s: float = 0.0
    """Seconds that workers have lived, all added up."""
    idle_s: float = 0.0
    """Those of them in which a worker had no unit."""
    counted_at: float = field(default_factory=time.monotonic)

    def accepted(self, worker: str, device: str, completions: int) -> None:
        """A unit of a worker's was accepted."""
        self.units += 1
        self.by_worker[worker] = self.by_worker.get(worker, 0) + completions
        self.sampled_on(device, completions)

    def sampled_on(self, device: str, completions: int) -> None:
        """Completions of workers on a device, or of the trainer's own engines, were accepted."""
        name = device.replace(" ", "-")
        self.by_device[name] = self.by_device.get(name, 0) + completions

    def take_by_device(self) -> dict[str, float]:
        """Metrics of `by_device`, which begins anew."""
        found = {f"fleet/sampled_{name}": float(number) for name, number in self.by_device.items()}
        self.by_device = {}
        return found

    def lived(self, busy: Sequence[bool]) -> None:
        """Adds the time since the last call to what workers lived and idled. busy: whether each of them had a
        unit in it."""
        now = time.monotonic()
        passed_s = now - self.counted_at
        self.counted_at = now
        self.worker_s += passed_s * len(busy)
        self.idle_s += passed_s * busy.count(False)

    def take_idle_share(self) -> float:
        """Share of the workers' time since the last call in which they had no unit; 0 without workers."""
        share = self.idle_s / self.worker_s if self.worker_s else 0.0
        self.worker_s = self.idle_s = 0.0
        return share


def roster_entry(mark: dict[str, Any], lives: bool, why: str, completions: int) -> dict[str, Any]:
    """A worker as display and report tell it. why: it does not live. completions: its accepted ones."""
    return {
        "worker": mark["worker"],
        "host": mark["host"],
        "device": mark["device"],
        "lives": lives,
        "why": why,
        "state": mark["state"],
        "completions": completions,
        "completions_per_s": mark["rate"] if lives else 0.0,
    }
