"""When a run goes on to harder rows: by the pass rate of its last steps, so by logged rewards alone."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import Data


@dataclass
class Standing:
    """Where a run stands among the levels of its rows."""

    level: int = 0
    """Number of the level that is drawn from, from 0."""
    level_steps: int = 0
    """Steps at this level that are counted."""
    level_passed: float = 0.0
    """Sum of their pass rates."""

    def passed(self, rate: float, config: Data, levels: int) -> None:
        """Counts a step's pass rate; after `curriculum_steps` of them goes one level up, or counts anew.

        levels: how many there are; the last is kept.
        """
        self.level_steps += 1
        self.level_passed += rate
        if self.level_steps < config.curriculum_steps:
            return
        if self.level_passed / self.level_steps >= config.curriculum and self.level < levels - 1:
            self.level += 1
        self.level_steps = 0
        self.level_passed = 0.0
