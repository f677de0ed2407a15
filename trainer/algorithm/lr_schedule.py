"""The learning rate as a pure function of the update: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from trainer.config import Optimizer


def learning_rate(optimizer: Optimizer, update: int, total_updates: int) -> float:
    """Learning rate of optimizer step `update`, counted from 0. It warms up linearly. Then it is constant, or
    falls to its floor at `total_updates`."""
    warmup = optimizer.warmup_steps or math.ceil(optimizer.warmup_ratio * total_updates)
    if update < warmup:
        return optimizer.learning_rate * (update + 1) / warmup
    progress = min((update - warmup) / max(total_updates - warmup, 1), 1.0)
    match optimizer.schedule:
        case "constant":
            return optimizer.learning_rate
        case "linear":
            left = 1 - progress
        case "cosine":
            left = 0.5 * (1 + math.cos(math.pi * progress))
    return optimizer.learning_rate * (optimizer.floor + (1 - optimizer.floor) * left)
