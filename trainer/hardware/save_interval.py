"""How often to save."""

from __future__ import annotations

import math


def save_interval_s(stall_s: float, mean_time_between_s: float) -> float:
    """Seconds of work between checkpoints that lose the least time: Daly's estimate, which refines Young's
    sqrt(2dM).

    stall_s: what one checkpoint takes from training (of an asynchronous one: the copy off the device).
    mean_time_between_s: mean time between preemptions of the whole job, which is that of one node divided by
    the nodes. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    FGCS 22 (2006), eq. 37.
    """
    if stall_s <= 0:
        return 0.0
    if stall_s >= 2 * mean_time_between_s:
        return mean_time_between_s
    x = stall_s / (2 * mean_time_between_s)
    return math.sqrt(2 * stall_s * mean_time_between_s) * (1 + math.sqrt(x) / 3 + x / 9) - stall_s
