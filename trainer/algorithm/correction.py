"""Engine against policy: weights that correct for what they disagree on, and how far they are apart.

The engine samples with its own kernels and precision, so that its probabilities are not quite the policy's. All inputs
are flat [N] over completion tokens; sequences lie one after another, `lengths` [B] tokens each.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainer.algorithm.losses import K3, LOG_RATIO, per_sequence

Kind = Literal["truncate", "mask"]
Level = Literal["token", "sequence", "geometric"]


def rollout_weights(
    log_ratio: Tensor, lengths: Tensor, kind: Kind, level: Level, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Weights of the tokens' losses, and which of them were cut or masked; both [N], without gradient.

    log_ratio: log policy - log engine of each token. truncate: its exponential, no more than `high` and no less than
    `low` (truncated importance sampling); mask: 0 beyond them (IcePop, arXiv 2510.18855). level: the token's ratio, its
    sequence's product (unbiased, and the further from 1 the longer it is), or the product's geometric mean.
    """
    x = log_ratio.detach()
    if level != "token":
        x = per_sequence(x, lengths, mean=level == "geometric")
    ratio = x.clamp(-LOG_RATIO, LOG_RATIO).exp()
    beyond = (ratio < low) | (ratio > high)
    return (ratio.clamp(low, high) if kind == "truncate" else ratio.masked_fill(beyond, 0.0)), beyond


def mismatch(log_ratio: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Weighted sums that tell how far engine and policy are apart on the engine's own tokens.

    With x = log policy - log engine, and tokens drawn from the engine: KL(engine || policy) = E[e^x - 1 - x] and
    KL(policy || engine) = E[x e^x - e^x + 1], each of them never negative, and a
    token's no more than 10. The mean of e^x and that of its square give
    the effective sample size, mean^2 / mean square, as a share of the tokens.
    """
    x = log_ratio.detach().clamp(-LOG_RATIO, LOG_RATIO)
    ratio, off = x.exp(), torch.expm1(x)
    return {
        "mismatch/logprob_abs_mean": (weights * log_ratio.detach().abs()).sum(),
        "mismatch/kl": (weights * (off - x).clamp(max=K3)).sum(),
        "mismatch/kl_reverse": (weights * (x * ratio - off).clamp(max=K3)).sum(),
        "mismatch/ratio_mean": (weights * ratio).sum(),
        "ratio_square": (weights * ratio.square()).sum(),
    }
