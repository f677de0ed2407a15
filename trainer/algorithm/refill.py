"""Dynamic sampling (DAPO, arXiv 2503.14476): groups of equal reward are replaced by new prompts. Plain Python.

Which prompts are asked next follows from how many were asked before, which is saved with the checkpoint; and which
groups are trained on, from the rewards. So a resumed run samples and trains on what the uninterrupted one would have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def shortfall(flat: Sequence[bool], size: int) -> int:
    """Prompts of the next round: as many as should give the groups that lack, at the share that had unequal rewards so
    far; no more than `size`, 0 where there are enough. flat: of every group so far, whether its rewards are equal."""
    useful = len(flat) - sum(flat)
    missing = max(size - useful, 0)
    return min(size, math.ceil(missing * len(flat) / useful)) if useful else missing


def chosen(flat: Sequence[bool], size: int) -> list[int]:
    """The `size` groups that are trained on, in the order in which they were asked: those of unequal rewards first to
    last, then, where they are too few, of the others."""
    order = sorted(range(len(flat)), key=lambda group: (flat[group], group))
    return sorted(order[:size])
