"""What routing replay does between an engine and its policy. Runs inside scenarios.py; not a test itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.learning.one_rank import OneRank
from trainer.algorithm.traces import Prompt, Trace


def replayed(config, rank, port):
    """Completions of fresh weights: experts that the engine gave, and how far policy and engine are apart
    when the policy goes through them and when it chooses for itself."""
    worker = OneRank(config).start(rank, port)
    worker.sampler.load(0)
    rows = list(range(8))
    prompts = [Prompt(group=i, row=row, seed=1000 + row) for i, row in enumerate(rows)]
    traces = worker.sample(prompts, 4, config.rollout.temperature)
    free = [replace(trace, routes=None) for trace in traces]
    replay = worker.policy.trained.replay
    out: dict[str, Any] = {"replayed": distances(worker, traces)}
    out["rerouted"] = float(replay.differing())
    out["free"] = distances(worker, free)
    out["shapes"] = sorted({trace.routes.shape[1:] for trace in traces})
    out["whole"] = all(len(trace.routes) == len(trace.tokens) - 1 for trace in traces)
    without = worker.sample(prompts, 1, 0.0, with_routes=False)
    out["evaluated"] = all(trace.routes is None for trace in without)
    out["largest"] = max(int(trace.routes.max()) for trace in traces)
    of_prompts = {}
    out["one_prompt"] = True
    for trace in traces:
        first = of_prompts.setdefault(trace.group, trace.routes[: trace.shared])
        out["one_prompt"] &= bool(np.array_equal(first, trace.routes[: trace.shared]))
    return out


def distances(worker: OneRank, traces: list[Trace]) -> dict[str, float]:
    """|log-prob difference| of engine and policy over the sampled tokens."""
    (policy,) = worker.logprobs([traces])["old"]
    gap = np.abs(policy - np.concatenate([trace.logprobs for trace in traces]))
    return {"largest": float(gap.max()), "mean": float(gap.mean()), "tokens": len(gap)}
