"""The GRPO objective as pure functions of flat token tensors [N]: all completion tokens of a micro-batch, no padding.

Every token carries a weight that already holds the denominator of the whole optimizer step over all ranks, so losses
are plain sums: micro-batch size, packing and sharding change neither loss nor gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO = 20.0
"""Log-ratios are clamped to this many nats before the exponential, as in verl (core_algos.compute_policy_loss): beyond
88 it is infinite in fp32, and times an advantage of 0 not a number."""
K3 = 10.0
"""Largest k3 of a token."""


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy, [N] (Schulman, "Approximating KL").

    With d = log p - log q: k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d. As a loss, k2's gradient is that of the KL itself;
    k1's has mean zero; k3's is that of the reverse KL. For k3, as in verl (core_algos.kl_penalty, low_var_kl), d is
    clamped to +-20 and the value to 10: beyond, at 2.6 nats below the reference, neither value nor gradient grows.
    """
    d = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            q = (-d).clamp(-LOG_RATIO, LOG_RATIO)
            return (torch.expm1(q) - q).clamp(max=K3)


def token_weights(lengths: Tensor, denominator: Literal["tokens", "sequences"], tokens: int, sequences: int) -> Tensor:
    """Weights of all completion tokens, [sum of lengths], for sequences of `lengths` [B].

    tokens, sequences: counts over the whole optimizer step and all ranks. "tokens": 1 / tokens for every token.
    "sequences": 1 / (sequences * own length). Either way they sum to 1 over the step.
    """
    match denominator:
        case "tokens":
            return torch.full((int(lengths.sum()),), 1.0 / tokens)
        case "sequences":
            return torch.repeat_interleave(1.0 / (sequences * lengths.double()), lengths).float()


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of one micro-batch, and weighted sums for the metrics (they add up over micro-batches and ranks)."""

    total: Tensor
    """Scalar to run backward on: policy + kl_coef * kl."""
    policy: Tensor
    kl: Tensor
    clip_fraction: Tensor
    ratio: Tensor
    clamped: Tensor
    """Share of tokens whose log-ratio or k3 was clamped."""


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
) -> PolicyLoss:
    """Clipped surrogate of PPO (arXiv 1707.06347) with GRPO's KL term: sum_t w_t (-min(r A, clip(r) A) + c KL_t).

    All inputs are [N] float32; `old_logprobs` are those of the policy that the update started from.
    """
    log_ratio = logprobs - old_logprobs
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO, LOG_RATIO))
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = -torch.minimum(ratio * advantages, clipped * advantages)
    policy = (weights * surrogate).sum()
    kl, clamped = logprobs.new_zeros(()), log_ratio.detach().abs() > LOG_RATIO
    if ref_logprobs is not None:
        estimate = kl_divergence(logprobs, ref_logprobs, kl_estimator)
        kl = (weights * estimate).sum()
        if kl_estimator == "k3":
            clamped = clamped | (estimate.detach() >= K3)
    with torch.no_grad():
        clip_fraction = (weights * (clipped * advantages < ratio * advantages)).sum()
    return PolicyLoss(
        policy + kl_coef * kl,
        policy.detach(),
        kl.detach(),
        clip_fraction,
        (weights * ratio).sum().detach(),
        (weights * clamped).sum(),
    )


def discounted(advantages: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """Spreads one advantage per sequence [B] over its tokens [sum of lengths]: A_t = gamma^(T-1-t) A."""
    spread = torch.repeat_interleave(advantages, lengths)
    if gamma == 1.0 or not len(lengths):
        return spread
    exponents = torch.cat([torch.arange(int(n) - 1, -1, -1) for n in lengths])
    return spread * gamma**exponents
