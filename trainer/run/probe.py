"""Whether engine and policy are the same model: sample, score by the learner, compare."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from trainer.algorithm.traces import Prompt, Trace
from trainer.config import RunConfig
from trainer.fleet.admission import AdmissionTest
from trainer.learning.learner import Learner
from trainer.run.rows import Rows
from trainer.sampling.sampler import SampledGroups, Sampler, SamplingRequest

PROBE_TOKENS = 16
PROBE_SEED = 7


def probe_ask(config: RunConfig, rows: Rows, version: int) -> SamplingRequest:
    """What a probe asks: short completions of a few prompts, one for each engine that the ranks would
    have."""
    engines = config.placement.world_size // config.rollout.tensor_parallel
    usable, split = rows.usable(config.train_split), config.train_split
    prompts = []
    for i in range(engines):
        prompts.append(Prompt(group=i, row=usable[i % len(usable)], seed=PROBE_SEED))
    return SamplingRequest(
        kind="probe",
        step=version,
        version=version,
        prompts=prompts,
        split=split,
        prompt_tokens=rows.prompt_tokens(split),
        samples_per_prompt=2,
        temperature=config.rollout.temperature,
        max_tokens=min(PROBE_TOKENS, config.rollout.max_tokens),
    )


def ask_probe(config: RunConfig, sampler: Sampler, rows: Rows, version: int) -> SampledGroups:
    """Starts to sample a probe with the weights of `version`, just loaded."""
    return sampler.sample(probe_ask(config, rows, version))


def admission_test(config: RunConfig, learner: Learner, rows: Rows) -> AdmissionTest:
    """How rollout workers are probed, each one before its samples train."""

    def score(traces: Sequence[Trace]) -> Sequence[np.ndarray]:
        scored = learner.logprobs(traces, config.train_split, old=True, reference=False).old
        assert scored is not None
        return scored

    return AdmissionTest(partial(probe_ask, config, rows), score, config.engine_tolerance)


def check_first_sync(config: RunConfig, sampler: Sampler, learner: Learner, rows: Rows, version: int) -> None:
    """Compares the two on a few prompts, right after the first load, that of `version`. It works for any
    sampler and any learner.

    Raises RuntimeError if they are not the same model.
    """
    traces = ask_probe(config, sampler, rows, version).all()
    scored = learner.logprobs(traces, config.train_split, old=True, reference=False).old
    assert scored is not None
    gaps: dict[int, list[np.ndarray]] = {}
    for trace, policy in zip(traces, scored, strict=True):
        gaps.setdefault(trace.group, []).append(np.abs(policy - trace.logprobs))
    means = []
    largest = []
    for parts in gaps.values():
        of_engine = np.concatenate(parts)
        means.append(of_engine.mean())
        largest.append(of_engine.max())
    mean, worst = float(np.max(means)), float(np.max(largest))

    limit = config.engine_tolerance
    print(f"weight sync: engine and policy differ by {mean:.1e} nats (mean), {worst:.1e} (max)", flush=True)
    if not mean <= limit:
        raise RuntimeError(
            f"after the weight sync engine and policy differ by {mean:.2e} nats per token (limit"
            f" {limit:.0e}): the engine does not hold the policy's weights; training on it would be noise."
            " See docs/failures.md"
        )
