"""Dynamic sampling in plain Python (DAPO, arXiv 2503.14476): new prompts replace groups of equal reward.

The number of prompts that were sampled before, which is saved with the checkpoint, decides which
prompts come next. The rewards decide which groups are trained on. So a resumed run samples and trains
on what the uninterrupted run would have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def prompts_to_refill(flat: Sequence[bool], size: int) -> int:
    """Number of prompts of the next round, `size` at most; 0 if there are enough groups of unequal rewards.

    `flat` says of every group so far whether its rewards are equal. The next round should give the
    missing groups at the share of unequal ones so far.
    """
    useful = len(flat) - sum(flat)
    missing = max(size - useful, 0)
    if not useful:
        return missing
    return min(size, math.ceil(missing * len(flat) / useful))


def choose_groups(flat: Sequence[bool], size: int) -> list[int]:
    """The `size` groups that are trained on, in the order in which they were sampled.

    Groups of unequal rewards are taken first; groups of equal rewards fill what is missing.
    """
    order = sorted(range(len(flat)), key=lambda group: (flat[group], group))
    return sorted(order[:size])
