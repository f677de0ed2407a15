"""Whether a worker's engine is the policy: every worker samples a probe before anything else, and the learner
scores it with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.algorithm.traces import Trace
from trainer.sampling.sampler import Ask


@dataclass(frozen=True)
class Admission:
    """How workers are probed."""

    ask: Callable[[int], Ask]
    """What a probe asks of a version of the weights."""
    score: Callable[[Sequence[Trace]], Sequence[np.ndarray]]
    """The learner's log-probabilities of completions, with the weights that it holds."""
    limit: float
    """Mean difference in nats per token beyond which a worker is turned away."""

    def refusal(self, traces: Sequence[Trace], device: str) -> str:
        """Why a worker may not sample, as a sentence; empty where it may. traces: of a probe with the
        learner's weights."""
        gaps = []
        for trace, policy in zip(traces, self.score(traces), strict=True):
            gaps.append(np.abs(policy - trace.logprobs))
        mean = float(np.concatenate(gaps).mean())
        if mean <= self.limit:
            return ""
        return (
            f"on a probe its engine ({device}) and the policy differ by {mean:.2e} nats per token (limit"
            f" {self.limit:.0e}, rollout.sync_tolerance): its weights, kernels or temperature are others"
        )
