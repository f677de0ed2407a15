"""Compares engines and policy: on a few short completions, which the learner scores with the same weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.algorithm.staleness import kernel_mismatch
from trainer.algorithm.traces import Prompt, Trace
from trainer.config import RunConfig
from trainer.fleet.fleet_sampler import AdmissionTest
from trainer.learning.distributed import DistributedLearner
from trainer.run.measured_rows import Rows
from trainer.sampling.sampler import SampledGroups, Sampler, SamplingRequest

PROBE_TOKENS = 16
PROBE_SEED = 7


class Probe:
    """Works for any sampler and any learner."""

    def __init__(self, config: RunConfig, rows: Rows, learner: DistributedLearner) -> None:
        self.config = config
        self.rows, self.learner = rows, learner

    def request(self, version: int) -> SamplingRequest:
        """Short completions of a few prompts, one for each engine that the ranks would have."""
        rollout, split = self.config.rollout, self.config.train_split
        usable = self.rows.usable(split)
        engines = range(self.config.placement.world_size // rollout.tensor_parallel)
        prompts = [Prompt(group=i, row=usable[i % len(usable)], seed=PROBE_SEED) for i in engines]
        return SamplingRequest(
            kind="probe",
            step=version,
            version=version,
            prompts=prompts,
            split=split,
            prompt_tokens=self.rows.prompt_tokens(split),
            samples_per_prompt=2,
            temperature=rollout.temperature,
            max_tokens=min(PROBE_TOKENS, rollout.max_tokens),
        )

    def start(self, sampler: Sampler, version: int) -> SampledGroups:
        """Starts to sample a probe with the weights of `version`, just loaded."""
        return sampler.sample(self.request(version))

    def policy_logprobs(self, traces: Sequence[Trace]) -> list[np.ndarray]:
        """The policy's log-probabilities of the learned tokens, [T] per trace."""
        scored = self.learner.logprobs(traces, self.config.train_split, old=True, reference=False).old
        assert scored is not None
        return scored

    def mismatch(self, traces: list[Trace]) -> dict[str, float]:
        """`mismatch/*` of traces that the policy's current weights sampled; empty of none."""
        return kernel_mismatch(traces, self.policy_logprobs(traces)) if traces else {}

    def admission_test(self) -> AdmissionTest:
        """How rollout workers are probed, each one before its samples train."""
        return AdmissionTest(self.request, self.policy_logprobs, self.config.engine_tolerance)

    def check_first_sync(self, sampler: Sampler, version: int) -> None:
        """Compares the two right after the first load, that of `version`. Raises RuntimeError if they are not
        the same model."""
        traces = self.start(sampler, version).all()
        gaps: dict[int, list[np.ndarray]] = {}
        for trace, policy in zip(traces, self.policy_logprobs(traces), strict=True):
            gaps.setdefault(trace.group, []).append(np.abs(policy - trace.logprobs))
        by_engine = [np.concatenate(parts) for parts in gaps.values()]
        mean = float(np.max([gap.mean() for gap in by_engine]))
        worst = float(np.max([gap.max() for gap in by_engine]))
        limit = self.config.engine_tolerance
        differ = f"engine and policy differ by {mean:.1e} nats (mean), {worst:.1e} (max)"
        print(f"weight sync: {differ}", flush=True)
        if not mean <= limit:
            raise RuntimeError(
                f"after the weight sync engine and policy differ by {mean:.2e} nats per token (limit"
                f" {limit:.0e}): the engine does not hold the policy's weights; training on it would be"
                " noise. See docs/failures.md"
            )
