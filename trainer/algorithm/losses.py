"""The policy objectives as pure functions of flat token tensors [N]: the completion tokens of a
micro-batch, without padding.

Every token carries a weight that already holds the denominator of the whole optimizer step over all
ranks. So losses are plain sums, and micro-batch size, packing and sharding change neither loss nor
gradient. A sequence is never cut: `lengths` [B], the number of tokens of each sequence, is all that
functions of whole sequences need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.config.algorithm import SurrogateKind

KLEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO = 20.0
"""Log-ratios are clamped to this many nats before the exponential, as in verl
(core_algos.compute_policy_loss).

Beyond 88 nats the exponential is infinite in fp32, and infinity times an advantage of 0 is not a number."""


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy || reference) at each token, from samples of the policy, [N].

    With d = log p - log q: k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d (Schulman, "Approximating KL"). As a
    loss, k2 has the gradient of the KL itself, k1 has a gradient of mean zero, and k3 has that of the
    reverse KL.

    k3 is exact until a token is 20 nats below the reference, and goes on as a straight line from there: the
    exponential would leave fp32, and a clamped value has no gradient, so the tokens that are furthest away
    would not be pulled back (verl clamps the value to 10).
    """
    d = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            q = (-d).clamp(max=LOG_RATIO)
            beyond = (-d - LOG_RATIO).clamp(min=0)
            return torch.expm1(q) - q + beyond * math.expm1(LOG_RATIO)


def token_weights(
    lengths: Tensor,
    denominator: Literal["tokens", "sequences", "constant"],
    tokens: int,
    sequences: int,
    max_tokens: int = 0,
) -> Tensor:
    """Weights of all completion tokens, [sum of lengths], for sequences of `lengths` [B].

    `tokens` and `sequences` are counts over the whole optimizer step and all ranks. The weight of a token is
    1 / tokens for "tokens", 1 / (sequences * length of its sequence) for "sequences", and
    1 / (sequences * max_tokens) for "constant". The first two sum to 1 over the step.
    """
    match denominator:
        case "tokens":
            return torch.full((int(lengths.sum()),), 1.0 / max(tokens, 1))
        case "sequences":
            return torch.repeat_interleave(1.0 / (sequences * lengths.double()), lengths).float()
        case "constant":
            return torch.full((int(lengths.sum()),), 1.0 / max(sequences * max_tokens, 1))


def per_sequence(values: Tensor, lengths: Tensor, mean: bool) -> Tensor:
    """Sum or mean of `values` [N] over each sequence, repeated for each of its tokens, [N]."""
    lengths = lengths.to(values.device)
    sequences = torch.arange(len(lengths), device=values.device)
    index = torch.repeat_interleave(sequences, lengths, output_size=len(values))
    out = values.new_zeros(len(lengths)).index_add(0, index, values)
    if mean:
        out = out / lengths.to(values).clamp(min=1)
    return out[index]


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of one micro-batch, and weighted sums for the metrics that add up over micro-batches and ranks."""

    total: Tensor
    """Scalar to run backward on: policy + kl_coef * kl."""
    policy: Tensor
    kl: Tensor
    clip_fraction: Tensor
    ratio: Tensor
    clamped: Tensor
    """Share of the tokens whose log-ratio was clamped, or whose k3 was continued as a line."""


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
    """Loss of each token before its weight, the ratio in it, and whether the ratio was clipped; all [N].

    ppo: -min(r A, clip(r) A) (arXiv 1707.06347). With `dual_clip`, at most -dual_clip A where A < 0
    (1912.09729).

    gspo: PPO with the geometric mean of the sequence's ratios, whose gradient goes to each token (GSPO-token,
    2507.18071). It equals GSPO if all tokens of a sequence have the same weight and advantage.

    cispo: -clip(r) A log p. The clipped ratio is held constant, so that no token loses its gradient
    (2506.13585).

    gmpo: -A times the geometric mean of the sequence's ratios. The logarithm of each ratio is clipped
    on the side to which A would push it (2507.20673).
    """
    if kind == "gmpo":
        assert lengths is not None
        sign = advantages.sign()
        pushed = torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_low, clip_high))
        kept = sign * pushed
        ratio = per_sequence(kept, lengths, mean=True).clamp(-LOG_RATIO, LOG_RATIO).exp()
        return -advantages * ratio, ratio, (kept != log_ratio) & (advantages != 0)
    if kind == "gspo":
        assert lengths is not None
        # The difference is 0 and carries each token's gradient.
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
    """A surrogate loss, PPO's by default, with GRPO's KL term: sum_t w_t (c_t L_t + kl_coef KL_t).

    All inputs are [N] float32, but for `lengths` [B], which gspo and gmpo need. `old_logprobs` are
    those of the policy that the update started from. `correction` holds the rollout correction's weight of
    each token; None: 1. `shares` are the weights of the means in the metrics, which sum to 1 over the
    step; None: `weights`.
    """
    if shares is None:
        shares = weights
    log_ratio = logprobs - old_logprobs
    losses, ratio, hit = surrogate(
        kind, logprobs, log_ratio, advantages, lengths, clip_low, clip_high, dual_clip
    )
    if correction is not None:
        losses = losses * correction
    policy = (weights * losses).sum()

    term = logprobs.new_zeros(())
    kl = logprobs.new_zeros(())
    clamped = log_ratio.detach().abs() > LOG_RATIO
    if ref_logprobs is not None:
        estimate = kl_divergence(logprobs, ref_logprobs, kl_estimator)
        term = (weights * estimate).sum()
        kl = (shares * estimate.detach()).sum()
        if kl_estimator == "k3":
            clamped = clamped | (ref_logprobs - logprobs.detach() > LOG_RATIO)

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


def discount_advantages(advantages: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """Advantages of tokens [sum of lengths] from those of their sequences [B]: A_t = gamma^(T-1-t) A."""
    spread = torch.repeat_interleave(advantages, lengths)
    if gamma == 1.0 or not len(lengths):
        return spread
    exponents = torch.cat([torch.arange(int(n) - 1, -1, -1) for n in lengths])
    return spread * gamma**exponents


Kind = Literal["truncate", "mask"]
Level = Literal["token", "sequence", "geometric"]

MOST = 10.0
"""Largest value of a token in the metrics of the divergence, so that a single one does not hide the rest."""


def rollout_weights(
    log_ratio: Tensor, lengths: Tensor, kind: Kind, level: Level, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Weight of each token's loss, and whether it was cut or masked; both [N], without gradient.

    `log_ratio` is log policy - log engine of each token. With `level` "sequence" it is the sequence's
    sum (unbiased, but further from 0 the longer the sequence is), with "geometric" the sequence's mean.

    truncate: the ratio cut to `low` and `high` (truncated importance sampling). mask: the ratio, but 0
    where it is below `low` or above `high` (IcePop, arXiv 2510.18855).
    """
    x = log_ratio.detach()
    if level != "token":
        x = per_sequence(x, lengths, mean=level == "geometric")
    ratio = x.clamp(-LOG_RATIO, LOG_RATIO).exp()
    beyond = (ratio < low) | (ratio > high)
    if kind == "truncate":
        return ratio.clamp(low, high), beyond
    return ratio.masked_fill(beyond, 0.0), beyond


def mismatch_sums(log_ratio: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Weighted sums that measure how far engine and policy are apart on the tokens that the engine sampled.

    With x = log policy - log engine: KL(engine || policy) = E[e^x - 1 - x] and KL(policy || engine) =
    E[x e^x - e^x + 1]. Neither is ever negative at a token, and each is cut to 10. The effective sample
    size, as a share of the tokens, is mean^2 / mean square of e^x.
    """
    x = log_ratio.detach().clamp(-LOG_RATIO, LOG_RATIO)
    ratio = x.exp()
    off = torch.expm1(x)
    return {
        "mismatch/logprob_abs_mean": (weights * log_ratio.detach().abs()).sum(),
        "mismatch/kl": (weights * (off - x).clamp(max=MOST)).sum(),
        "mismatch/kl_reverse": (weights * (x * ratio - off).clamp(max=MOST)).sum(),
        "mismatch/ratio_mean": (weights * ratio).sum(),
        "ratio_square": (weights * ratio.square()).sum(),
    }
