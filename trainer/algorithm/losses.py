"""The policy objectives as pure functions of flat token tensors [N]: a micro-batch's completion tokens, no padding.

Every token carries a weight that already holds the denominator of the whole optimizer step over all ranks, so losses
are plain sums: micro-batch size, packing and sharding change neither loss nor gradient. A sequence is never cut, so
what is per sequence needs only `lengths` [B], the tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.config.algorithm import SurrogateKind

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


def token_weights(
    lengths: Tensor,
    denominator: Literal["tokens", "sequences", "constant"],
    tokens: int,
    sequences: int,
    max_tokens: int = 0,
) -> Tensor:
    """Weights of all completion tokens, [sum of lengths], for sequences of `lengths` [B].

    tokens, sequences: counts over the whole optimizer step and all ranks. "tokens": 1 / tokens for every token.
    "sequences": 1 / (sequences * own length). Either way they sum to 1 over the step. "constant": 1 / (sequences *
    max_tokens), which does not sum to 1.
    """
    match denominator:
        case "tokens":
            return torch.full((int(lengths.sum()),), 1.0 / max(tokens, 1))
        case "sequences":
            return torch.repeat_interleave(1.0 / (sequences * lengths.double()), lengths).float()
        case "constant":
            return torch.full((int(lengths.sum()),), 1.0 / max(sequences * max_tokens, 1))


def per_sequence(values: Tensor, lengths: Tensor, mean: bool) -> Tensor:
    """Each token's sequence's sum or mean, [N]."""
    index = torch.repeat_interleave(
        torch.arange(len(lengths), device=values.device), lengths.to(values.device), output_size=len(values)
    )
    sums = values.new_zeros(len(lengths)).index_add(0, index, values)
    return (sums / lengths.to(values).clamp(min=1) if mean else sums)[index]


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


def surrogate(
    kind: SurrogateKind,
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    lengths: Tensor | None,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each token before its weight, the ratio in it, and whether it was clipped; all [N].

    ppo: -min(r A, clip(r) A) (arXiv 1707.06347); with `dual_clip` no more than -dual_clip A where A < 0 (1912.09729).
    gspo: the same with the geometric mean of the sequence's ratios, whose gradient goes to each token (GSPO-token,
    2507.18071): equal to GSPO where weights and advantages are a sequence's. cispo: -clip(r) A log p with the clipped
    ratio held constant, so that no token loses its gradient (2506.13585). gmpo: -A times the geometric mean of the
    sequence's ratios, each clipped in its logarithm on the side that A would push it to (2507.20673).
    """
    if kind == "gmpo":
        assert lengths is not None
        sign = advantages.sign()
        kept = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_low, clip_high))
        ratio = per_sequence(kept, lengths, mean=True).clamp(-LOG_RATIO, LOG_RATIO).exp()
        return -advantages * ratio, ratio, (kept != log_ratio) & (advantages != 0)
    if kind == "gspo":
        assert lengths is not None
        log_ratio = logprobs - logprobs.detach() + per_sequence(log_ratio.detach(), lengths, mean=True)
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO, LOG_RATIO))
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if kind == "cispo":
        return -clipped.detach() * advantages * logprobs, ratio, clipped != ratio
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    hit = clipped * advantages < ratio * advantages
    if dual_clip:
        limit = -dual_clip * advantages
        hit = hit | ((advantages < 0) & (loss > limit))
        loss = torch.where(advantages < 0, torch.minimum(loss, limit), loss)
    return loss, ratio, hit


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
    kind: SurrogateKind = "ppo",
    dual_clip: float = 0.0,
    lengths: Tensor | None = None,
    correction: Tensor | None = None,
    shares: Tensor | None = None,
) -> PolicyLoss:
    """A surrogate with GRPO's KL term: sum_t w_t (c_t L_t + kl_coef KL_t). By default PPO's clipped one.

    All inputs but `lengths` [B] (needed by gspo and gmpo) are [N] float32; `old_logprobs` are those of the policy that
    the update started from. correction: weights for what engine and policy disagree on; None: 1. shares: weights of the
    metrics' means, which sum to 1 over the step; None: `weights`.
    """
    shares = weights if shares is None else shares
    log_ratio = logprobs - old_logprobs
    losses, ratio, hit = surrogate(
        kind, logprobs, log_ratio, advantages, lengths, clip_low, clip_high, dual_clip
    )
    if correction is not None:
        losses = losses * correction
    policy = (weights * losses).sum()
    term, kl, clamped = logprobs.new_zeros(()), logprobs.new_zeros(()), log_ratio.detach().abs() > LOG_RATIO
    if ref_logprobs is not None:
        estimate = kl_divergence(logprobs, ref_logprobs, kl_estimator)
        term, kl = (weights * estimate).sum(), (shares * estimate.detach()).sum()
        if kl_estimator == "k3":
            clamped = clamped | (estimate.detach() >= K3)
    total = policy + kl_coef * term
    with torch.no_grad():
        return PolicyLoss(
            total=total,
            policy=policy.detach(),
            kl=kl,
            clip_fraction=(shares * hit).sum(),
            ratio=(shares * ratio).sum(),
            clamped=(shares * clamped).sum(),
        )


def discounted(advantages: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """Spreads one advantage per sequence [B] over its tokens [sum of lengths]: A_t = gamma^(T-1-t) A."""
    spread = torch.repeat_interleave(advantages, lengths)
    if gamma == 1.0 or not len(lengths):
        return spread
    exponents = torch.cat([torch.arange(int(n) - 1, -1, -1) for n in lengths])
    return spread * gamma**exponents
