"""Weights that correct the loss where engine and policy disagree, and measures of the disagreement.

The engine samples with its own kernels and precision, so its probabilities are not quite those of the
policy. All inputs are flat [N] over completion tokens; sequences lie one after another, with `lengths`
[B] tokens each.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainer.algorithm.losses import LOG_RATIO, per_sequence

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
