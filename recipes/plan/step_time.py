"""Seconds of a step by phase."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by phase."""

    rollout: float
    logprobs: float
    update: float
    sync: float
    checkpoint: float
    images: float = 0.0
    """Host's work on images that the GPUs wait for."""
    phases: float = 0.0
    """Start-up of the phases."""

    @property
    def total(self) -> float:
        phases = self.rollout + self.logprobs + self.update + self.sync + self.checkpoint
        return phases + self.images + self.phases
