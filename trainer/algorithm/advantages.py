"""Advantage estimators: pure functions of rewards and explicit group ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Advantages:
    """Advantages of one step's samples."""

    values: Tensor
    """[N] float32."""
    zero_std_groups: int
    """Groups whose rewards are all equal: they teach nothing."""
    groups: int
    """Number of groups."""


def group_norm(rewards: Tensor, groups: Tensor, eps: float = 1e-6) -> Advantages:
    """(r - mean of its group) / (unbiased std of its group + eps), as in DeepSeekMath (arXiv 2402.03300, eq. 3).

    rewards: [N] float. groups: [N] integer ids, in any order, of any sizes. A group of one, or of equal
    rewards, gets 0. Computed in float64: the order of the samples does not matter beyond the last bit.
    """
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must both be [N]")
    values = torch.zeros(rewards.shape, dtype=torch.float64)
    ids = groups.unique().tolist()
    flat = 0
    for group in ids:
        members = groups == group
        r = rewards[members].double()
        if len(r) < 2 or bool((r == r[0]).all()):
            flat += 1
            continue
        values[members] = (r - r.mean()) / (r.std(unbiased=True) + eps)
    return Advantages(values.float(), flat, len(ids))


@dataclass
class RunningNorm:
    """Running mean and standard deviation of all rewards seen so far (Chan et al. 1979), saved with the checkpoint."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0
    """Sum of squared differences from the mean."""

    def __call__(self, rewards: Tensor) -> Tensor:
        """Takes in rewards [N], then returns them normalised by the statistics of everything seen, [N]."""
        r = rewards.double()
        delta, total = r.mean().item() - self.mean, self.count + len(r)
        self.m2 += ((r - r.mean()) ** 2).sum().item() + delta**2 * self.count * len(r) / total
        self.mean += delta * len(r) / total
        self.count = total
        std = (self.m2 / max(total - 1, 1)) ** 0.5
        return ((r - self.mean) / (std + 1e-6)).to(rewards.dtype)
