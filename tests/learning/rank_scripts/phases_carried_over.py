"""Rollout phases at drawn lengths, with completions that are carried over and without. Runs inside
scenarios.py."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from recipes.plan import passes
from recipes.presets import get
from tests.learning.one_rank import OneRank
from trainer.algorithm.staleness import slots_used
from trainer.algorithm.traces import Prompt, Trace
from trainer.config import RunConfig
from trainer.sampling import vllm_engine

RECIPE = "grpo-qwen2.5-vl-7b-mathv60k"
"""Whose lengths are drawn: mean and limit of its completions."""


def drawn(step: int, prompts: int, period: int) -> list[list[int]]:
    """Tokens of the completions of a step's first prompts, [prompt][sample], as the plan draws them; those of
    `period` steps come again and again, so that as many phases have the same tokens in any schedule."""
    recipe = get(RECIPE)
    lengths = passes.typical_lengths(recipe.config, recipe.dataset, random.Random(step % period), vision=True)
    samples = recipe.config.rollout.samples_per_prompt
    tokens = [length.completion_tokens for length in lengths[: prompts * samples]]
    return [tokens[start : start + samples] for start in range(0, len(tokens), samples)]


class Engine(vllm_engine.Engine):
    """It ends each completion where the drawn length says."""

    lengths: dict[int, list[int]]
    """Tokens of a prompt's completions, by its seed."""

    def _params(self, group: Any, index: int, temperature: float, max_tokens: int, top_p: float) -> Any:
        params = super()._params(group, index, temperature, self.lengths[group.prompt.seed][index], top_p)
        params.ignore_eos = True
        params.stop_token_ids = []
        return params

    def _trace(self, group: Any, index: int, output: Any, max_tokens: int) -> Trace:
        return super()._trace(group, index, output, self.lengths[group.prompt.seed][index])


def phases_carried_over(config: RunConfig, rank: int, port: int) -> list[dict[str, Any]]:
    """What `run.max_steps` phases took: all completions of a step at once, then in pieces, with each of a few
    schedules. The first phases, which only fill the pipeline, are left out."""
    vllm_engine.Engine = Engine  # ty: ignore[invalid-assignment]
    worker = OneRank(config).start(rank, port)
    limit = config.rollout.max_tokens
    found = []
    for ahead, cut in ((0, 0), (1, limit // 2), (3, limit // 4)):
        found.append({"staleness": ahead, "tokens_per_step": cut} | _phases(worker, config, ahead, cut))
    return found


def _phases(worker: OneRank, config: RunConfig, ahead: int, cut: int) -> dict[str, Any]:
    """Means over the phases of one schedule."""
    size, rows = config.rollout.prompts_per_step, len(worker.train_set)
    inner = worker.engine.llm.llm_engine
    step_of_engine = inner.step
    iterations = 0

    def counted() -> Any:
        nonlocal iterations
        iterations += 1
        return step_of_engine()

    inner.step = counted
    waiting: list[Trace] = []
    totals = {"iterations": 0.0, "seconds": 0.0, "tokens": 0.0, "slots_used": 0.0}
    for phase in range(1, ahead + config.run.max_steps + 1):
        worker.sampler.load(phase)
        prompts = []
        worker.engine.lengths = {}
        for due in range(phase, phase + ahead + 1):
            for i, lengths in enumerate(drawn(due, size, config.run.max_steps)):
                seed = 1000 * due + i
                group = (due - phase) * size + i
                worker.engine.lengths[seed] = lengths
                prompts.append(Prompt(group, seed % rows, seed, cut=cut if due > phase else 0))
        iterations, began = 0, time.perf_counter()
        traces = _sampled(worker, config, prompts, waiting)
        seconds = time.perf_counter() - began
        if phase > ahead:
            totals["iterations"] += iterations
            totals["seconds"] += seconds
            totals["tokens"] += sum(int((trace.token_versions == phase).sum()) for trace in traces)
            totals["slots_used"] += slots_used(traces, phase)
        waiting = [replace(trace, group=trace.group - size) for trace in traces if trace.group >= size]
        assert all(trace.end != "cut" for trace in traces if trace.group < size)
    inner.step = step_of_engine
    return {name: total / config.run.max_steps for name, total in totals.items()}


def _sampled(
    worker: OneRank, config: RunConfig, prompts: Sequence[Prompt], waiting: Sequence[Trace]
) -> list[Trace]:
    """All completions of the phase's prompts, with those that had ended before."""
    going_on = [trace for trace in waiting if trace.end == "cut"]
    cut = {trace.group for trace in going_on}
    ended = {trace.group for trace in waiting} - cut
    groups = worker.engine.generate(
        [prompt for prompt in prompts if prompt.group not in ended],
        lambda prompt: worker.reader.request(config.train_split, prompt.row),
        samples_per_prompt=config.rollout.samples_per_prompt,
        temperature=1.0,
        max_tokens=config.rollout.max_tokens,
        begun=going_on,
    )
    found = [trace for group in groups for trace in group]
    again = {(trace.group, trace.index) for trace in found}
    return found + [trace for trace in waiting if (trace.group, trace.index) not in again]
