"""Decides when a run goes on to harder rows: by the pass rate of its last steps.

The pass rate comes from logged rewards alone, so a resumed run decides the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import Data


@dataclass
class CurriculumState:
    """The level of rows that a run has reached, and its pass rate there."""

    level: int = 0
    """Level that rows are drawn from, counted from 0."""
    level_steps: int = 0
    """Number of steps counted at this level."""
    level_passed: float = 0.0
    """Sum of the pass rates of these steps."""

    def passed(self, rate: float, config: Data, levels: int) -> None:
        """Counts a step's pass rate. After `curriculum_steps` steps it goes one level up, or counts anew.

        levels: number of levels; the run stays at the last one.
        """
        self.level_steps += 1
        self.level_passed += rate
        if self.level_steps < config.curriculum_steps:
            return
        if self.level_passed / self.level_steps >= config.curriculum and self.level < levels - 1:
            self.level += 1
        self.level_steps = 0
        self.level_passed = 0.0
