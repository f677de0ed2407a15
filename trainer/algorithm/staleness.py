"""Measures how old the weights are that sampled a step, and how much their age alone changes probabilities.

If older weights sampled a step, the ratio of policy to engine differs from 1 for two reasons: other kernels,
and older weights. The first is measured on completions that the weights of the update have sampled. The rest
is due to the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from trainer.algorithm.losses import LOG_RATIO, mismatch_sums
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
"""Metrics of an update's ratios, and their names if older weights sampled the step."""


def versions_behind(traces: Sequence[Trace], step: int) -> dict[str, float]:
    """Number of versions by which the weights that sampled the traces of `step` are older than the weights
    before its update."""
    newest = step - 1
    behind = [newest - trace.versions[0] for trace in traces]
    return {
        "rollout/staleness_mean": sum(behind) / len(behind),
        "rollout/staleness_max": float(max(behind)),
    }


def kernel_mismatch(traces: Sequence[Trace], policy: Sequence[np.ndarray]) -> dict[str, float]:
    """`mismatch/*` of traces that the policy's current weights sampled. policy: the policy's
    log-probabilities of the learned tokens, [T] per trace."""
    engine = np.concatenate([trace.logprobs for trace in traces if trace.logprobs is not None])
    difference = np.concatenate(policy) - engine
    gap = torch.from_numpy(difference[np.isfinite(engine)]).double()
    if not len(gap):
        return {}

    sums = mismatch_sums(gap, torch.full_like(gap, 1 / len(gap)))
    out = {name: float(value) for name, value in sums.items()}
    square = out.pop("ratio_square")
    out["mismatch/logprob_abs_max"] = float(gap.abs().max())
    out["mismatch/ratio_max"] = float(gap.clamp(-LOG_RATIO, LOG_RATIO).exp().max())
    out["mismatch/ess"] = out["mismatch/ratio_mean"] ** 2 / square
    return out


def mismatch_by_age(
    traces: Sequence[Trace], policy: Sequence[np.ndarray], newest: int, low: float, high: float
) -> dict[str, float]:
    """Ratios of policy to engine by the age of the weights that sampled a token, for traces that several
    versions have sampled. policy: the policy's log-probabilities of the learned tokens, [T] per trace, with
    the weights of version `newest`. low, high: ratios beyond these are corrected."""
    gaps = []
    ages = []
    for trace, logprobs in zip(traces, policy, strict=True):
        if trace.logprobs is not None:
            gaps.append(logprobs - trace.logprobs)
            ages.append(newest - trace.token_versions[trace.learned - trace.shared])
    gap = np.concatenate(gaps).astype(np.float64)
    age = np.concatenate(ages)[np.isfinite(gap)]
    ratio = np.exp(gap[np.isfinite(gap)].clip(-LOG_RATIO, LOG_RATIO))

    out = {}
    for versions in np.unique(age):
        these = ratio[age == versions]
        name = f"staleness/age_{versions}"
        out[f"{name}_tokens"] = len(these) / len(ratio)
        out[f"{name}_ratio_mean"] = float(these.mean())
        out[f"{name}_ratio_max"] = float(these.max())
        out[f"{name}_corrected_fraction"] = float(((these < low) | (these > high)).mean())
    return out


def slots_used(traces: Sequence[Trace], version: int | None = None) -> float:
    """Share of the decode slots of a rollout phase that held an unfinished completion, if each of those that
    the weights of `version` sampled had a slot until the last was done; 0 if they sampled none. None: all
    sampled tokens count."""
    grown = []
    for trace in traces:
        versions = trace.token_versions[trace.learned - trace.shared]
        count = len(versions) if version is None else int((versions == version).sum())
        if count:
            grown.append(count)
    return sum(grown) / (len(grown) * max(grown)) if grown else 0.0


def separate_mismatch(stats: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step that older weights sampled. The ratios of its update, `stats`, are renamed to
    `staleness/*`; `mismatch/*` is the part that kernels alone cause, where it was `measured` before."""
    return {RATIOS.get(name, name): value for name, value in stats.items()} | dict(measured)
