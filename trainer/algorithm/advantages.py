"""Advantage estimators: pure functions of rewards and explicit group ids, in float64.

`rewards` are [N]; `groups` are [N] integer ids, in any order, for groups of any sizes. Estimators that
compare within groups give 0 to a group of one and to a group of equal rewards. The order of the samples
changes nothing beyond the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from trainer.config import Algorithm

VARIANCE = 1e-8
"""Smallest variance that token-level advantages are divided by, as in OpenRLHF."""


@dataclass(frozen=True)
class Advantages:
    """Advantages of one step's samples."""

    values: Tensor
    """[N] float32. Where the tokens of a sample have different advantages, this is their mean."""
    tokens: list[list[float]] | None = None
    """Advantage of each token of each sample. None: tokens have their sample's value, discounted by gamma."""


@dataclass(frozen=True)
class RewardParts:
    """Rewards of one step's samples: K kinds of reward, each with a weight."""

    names: tuple[str, ...]
    """Names of the K kinds in the metrics."""
    parts: Tensor
    """[N, K] float64."""
    weights: Tensor
    """[K]"""

    @property
    def total(self) -> Tensor:
        """Weighted sums, [N]."""
        # Added one by one: a matrix product may give rows of equal parts sums that differ in the last bit.
        total = self.parts.new_zeros(len(self.parts))
        for k, weight in enumerate(self.weights):
            total = total + weight * self.parts[:, k]
        return total


def estimate_advantages(
    algorithm: Algorithm,
    rewards: RewardParts,
    total: Tensor,
    groups: Tensor,
    lengths: Tensor,
    kl: Tensor | None = None,
) -> Advantages:
    """Advantages as `algorithm.advantage` defines them. `total` [N] holds the weighted rewards, normalized if
    the run is configured so. `lengths` [N] counts completion tokens. `kl` [sum of lengths] is the cost of
    each token's KL (`kl_in: reward`)."""
    eps = algorithm.advantage_eps
    tokens = None
    earned = total.double()
    if kl is not None:
        earned = earned - _sums(kl, lengths)
    match algorithm.advantage:
        case "group_norm":
            values = group_norm(earned, groups, eps)
        case "group_mean":
            values = group_mean(earned, groups)
        case "batch_norm":
            values = batch_norm(earned, groups, eps)
        case "rloo":
            values = leave_one_out(earned, groups)
        case "gdpo":
            values = gdpo(rewards.parts, rewards.weights, groups, eps)
        case "reinforce_pp" | "reinforce_pp_baseline":
            start = total.double() if algorithm.advantage == "reinforce_pp" else group_mean(total, groups)
            flat = whiten(returns_to_go(start, lengths, algorithm.gamma, kl))
            values = _sums(flat, lengths) / lengths.clamp(min=1)
            tokens = [x.tolist() for x in _split(flat, lengths)]
    return Advantages(values.float(), tokens)


def flat_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """Whether all rewards of a group are equal, for every group by ascending id, [groups]."""
    ids, index = _index(rewards, groups)
    empty = rewards.new_zeros(len(ids))
    least = empty.scatter_reduce(0, index, rewards, "amin", include_self=False)
    most = empty.scatter_reduce(0, index, rewards, "amax", include_self=False)
    return least == most


def group_norm(rewards: Tensor, groups: Tensor, eps: float = 1e-6) -> Tensor:
    """(r - mean of its group) / (unbiased std of its group + eps), [N] (DeepSeekMath, arXiv 2402.03300,
    eq. 3)."""
    ids, index = _index(rewards, groups)
    centered = group_mean(rewards, groups)
    counts = torch.bincount(index, minlength=len(ids))
    squares = centered.new_zeros(len(ids)).index_add(0, index, centered.square())
    std = (squares / (counts - 1).clamp(min=1)).sqrt() + eps
    return torch.where(centered == 0, 0.0, centered / std[index])


def group_mean(rewards: Tensor, groups: Tensor) -> Tensor:
    """r - mean of its group, [N] (Dr. GRPO, arXiv 2503.20783). The division by the standard deviation, which
    favors prompts that are easy or hard, is left out."""
    ids, index = _index(rewards, groups)
    r = rewards.double()
    means = r.new_zeros(len(ids)).index_add(0, index, r) / torch.bincount(index, minlength=len(ids))
    return torch.where(flat_groups(rewards, groups)[index], 0.0, r - means[index])


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """r - mean of the others in its group (RLOO, arXiv 2402.14740): (r - mean) n / (n - 1)."""
    ids, index = _index(rewards, groups)
    counts = torch.bincount(index, minlength=len(ids))
    return group_mean(rewards, groups) * (counts / (counts - 1).clamp(min=1))[index]


def batch_norm(rewards: Tensor, groups: Tensor, eps: float = 1e-6) -> Tensor:
    """(r - mean of its group) / (unbiased std of all rewards + eps), [N]. Described in arXiv 2508.08221; it
    is `scale_rewards="batch"` in TRL."""
    r = rewards.double()
    return group_mean(rewards, groups) / (r.std() + eps if len(r) > 1 else 1.0)


def gdpo(parts: Tensor, weights: Tensor, groups: Tensor, eps: float = 1e-6) -> Tensor:
    """Advantages from rewards that are normalized one by one, [N] (GDPO, arXiv 2601.05242). Each column of
    `parts` [N, K] is normalized in its groups; the sum weighted by `weights` [K] is then normalized over the
    batch (TRL's normalize_then_sum). So a reward of small spread is not drowned by one of large spread."""
    summed = parts.new_zeros(len(parts), dtype=torch.float64)
    for k, weight in enumerate(weights.tolist()):
        summed = summed + weight * group_norm(parts[:, k], groups, eps)
    if len(summed) < 2 or not summed.any():
        return torch.zeros_like(summed)
    return (summed - summed.mean()) / (summed.std() + eps)


def returns_to_go(rewards: Tensor, lengths: Tensor, gamma: float = 1.0, kl: Tensor | None = None) -> Tensor:
    """Returns to go of every token, [sum of lengths]: G_t = gamma G_t+1 - kl_t. A sequence's reward comes
    with its last token. `kl` [sum of lengths] is the cost of each token; None: 0."""
    costs = _split(torch.zeros(int(lengths.sum())) if kl is None else kl.double(), lengths)
    out: list[float] = []
    for reward, cost in zip(rewards.tolist(), costs, strict=True):
        earned = (-cost).tolist()
        if earned:
            earned[-1] += reward
        # From the last token to the first, each adds what comes after it.
        to_go = list(accumulate(reversed(earned), lambda later, now: now + gamma * later))
        out += reversed(to_go)
    return torch.tensor(out, dtype=torch.float64)


def whiten(values: Tensor) -> Tensor:
    """(x - mean) / std over all tokens of the step, [N] -> [N] (REINFORCE++, arXiv 2501.03262; OpenRLHF)."""
    if not len(values):
        return values
    centered = values - values.mean()
    return centered / centered.square().mean().clamp(min=VARIANCE).sqrt()


def _index(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must both be [N]")
    return groups.unique(return_inverse=True)


def _split(flat: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    return flat.split(lengths.tolist())


def _sums(flat: Tensor, lengths: Tensor) -> Tensor:
    if not len(lengths):
        return flat.double()
    return torch.stack([x.double().sum() for x in _split(flat, lengths)])


@dataclass
class RunningNorm:
    """Running mean and standard deviation of all rewards so far (Chan et al. 1979). It is saved with the
    checkpoint."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0
    """Sum of squared differences from the mean."""

    def normalize(self, rewards: Tensor) -> Tensor:
        """Adds rewards [N] to the statistics, and returns them normalized by the statistics, [N]. Raises
        ValueError, and leaves the statistics as they were, where they would no longer be finite."""
        r = rewards.double()
        delta = r.mean().item() - self.mean
        total = self.count + len(r)
        # A tensor's square of what is too large is infinite; a Python float's raises.
        between = torch.tensor(delta, dtype=torch.float64).square().item() * self.count * len(r) / total
        m2 = self.m2 + ((r - r.mean()) ** 2).sum().item() + between
        mean = self.mean + delta * len(r) / total
        if not (math.isfinite(m2) and math.isfinite(mean)):
            raise ValueError("a reward is not finite, or too large for a running mean")
        self.m2 = m2
        self.mean = mean
        self.count = total
        std = (self.m2 / max(total - 1, 1)) ** 0.5
        return ((r - self.mean) / (std + 1e-6)).to(rewards.dtype)
