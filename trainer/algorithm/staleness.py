"""How far the weights that sampled a step are behind those that learn from it, and what that alone does.

Where they are behind, the ratio of policy to engine has two causes: other kernels, and older weights. The
first is measured on completions that the weights of the update have sampled; the second is what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from trainer.algorithm.correction import mismatch
from trainer.algorithm.losses import LOG_RATIO
from trainer.algorithm.traces import Trace

RATIOS = {
    "mismatch/logprob_abs_mean": "staleness/logprob_abs_mean",
    "mismatch/logprob_abs_max": "staleness/logprob_abs_max",
    "mismatch/kl": "staleness/kl",
    "mismatch/kl_reverse": "staleness/kl_reverse",
    "mismatch/ratio_mean": "staleness/ratio_mean",
    "mismatch/ratio_max": "staleness/ratio_max",
    "mismatch/ess": "staleness/ess",
    "mismatch/corrected_fraction": "staleness/corrected_fraction",
}
"""Metrics of an update's ratios, and their names where older weights sampled."""


def versions_behind(traces: Sequence[Trace], step: int) -> dict[str, float]:
    """By how many versions the weights that sampled the traces of `step` are older than those before its
    update."""
    newest = step - 1
    behind = [newest - trace.versions[0] for trace in traces]
    return {
        "rollout/staleness_mean": sum(behind) / len(behind),
        "rollout/staleness_max": float(max(behind)),
    }


def kernel_mismatch(traces: Sequence[Trace], policy: Sequence[np.ndarray]) -> dict[str, float]:
    """`mismatch/*` of traces that the policy's own weights sampled. policy: its log-probabilities."""
    by_engine = []
    for trace in traces:
        if trace.logprobs is not None:
            by_engine.append(trace.logprobs)
    engine = np.concatenate(by_engine)
    difference = np.concatenate(policy) - engine
    gap = torch.from_numpy(difference[np.isfinite(engine)]).double()
    if not len(gap):
        return {}

    out = {}
    for name, value in mismatch(gap, torch.full_like(gap, 1 / len(gap))).items():
        out[name] = float(value)
    square = out.pop("ratio_square")
    out["mismatch/logprob_abs_max"] = float(gap.abs().max())
    out["mismatch/ratio_max"] = float(gap.clamp(-LOG_RATIO, LOG_RATIO).exp().max())
    out["mismatch/ess"] = out["mismatch/ratio_mean"] ** 2 / square
    return out


def told_apart(stats: Mapping[str, float], kernels: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics where older weights sampled it: what the update measured is `staleness/*`, and
    `mismatch/*` is what kernels alone do. kernels: `kernel_mismatch`, or empty where it was not measured."""
    out = {}
    for name, value in stats.items():
        out[RATIOS.get(name, name)] = value
    return out | dict(kernels)
