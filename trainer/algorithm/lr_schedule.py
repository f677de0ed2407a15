"""The learning rate as a pure function of the update: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from trainer.config import Optimizer


def learning_rate(optimizer: Optimizer, update: int, total_updates: int) -> float:
    """Rate of optimizer step `update` (from 0): linear warm-up, then constant, or to 0 at `total_updates`."""
    if update < optimizer.warmup_steps:
        return optimizer.learning_rate * (update + 1) / optimizer.warmup_steps
    progress = (update - optimizer.warmup_steps) / max(total_updates - optimizer.warmup_steps, 1)
    match optimizer.schedule:
        case "constant":
            return optimizer.learning_rate
        case "linear":
            return optimizer.learning_rate * max(1 - progress, 0.0)
        case "cosine":
            return optimizer.learning_rate * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
