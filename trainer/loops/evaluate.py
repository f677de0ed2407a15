"""Held-out accuracy, with the engine awake from the rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithm.seeding import seed_of
from trainer.algorithm.traces import Prompt
from trainer.config import RunConfig
from trainer.sampling.sampler import SamplingRequest

if TYPE_CHECKING:
    from trainer.run.session import Session


def evaluate(config: RunConfig, run: Session, step: int) -> dict[str, float]:
    """Held-out accuracy with the weights after `step`. Engines that sample steps ahead while the learner
    learns hold the policy's own weights only now: they sample a probe beside the evaluation, for
    `mismatch/*`."""
    if not (step and config.rollout.staleness and run.sampler.overlaps_learning):
        return _held_out(config, run, step)
    probe = run.probe.start(run.sampler, step)
    return _held_out(config, run, step) | run.probe.mismatch(probe.all())


def _held_out(config: RunConfig, run: Session, step: int) -> dict[str, float]:
    """Generates and grades completions of every held-out row, each time with the same rows and seeds. A
    prompt that is too long for the engine is skipped and counts as wrong: it stays in the denominator."""
    evaluation, split = config.evaluation, config.evaluation_split
    dataset = run.rows.dataset(split)
    lengths = run.rows.prompt_tokens(split)
    rows = [row for row, length in enumerate(lengths) if length < config.longest_sequence]
    prompts = [Prompt(group=row, row=row, seed=seed_of(config.run.seed, "eval", row)) for row in rows]
    ask = SamplingRequest(
        kind="eval",
        step=step,
        version=step,
        prompts=prompts,
        split=split,
        prompt_tokens=lengths,
        samples_per_prompt=evaluation.samples_per_prompt,
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        max_tokens=config.rollout.max_tokens,
    )
    traces = run.sampler.sample(ask).all()
    outcomes = run.score(traces, dataset)

    accuracy = [0.0] * len(lengths)
    for trace, outcome in zip(traces, outcomes, strict=True):
        accuracy[trace.row] += outcome.accuracy
    tokens = sum(len(trace.completion) for trace in traces)
    truncated = sum(not trace.finished for trace in traces)
    by_source: dict[str, list[float]] = {}
    for source, value in zip(dataset.column("source")[: len(lengths)], accuracy, strict=True):
        by_source.setdefault(source.rpartition("/")[2], []).append(value)
    wanted, generated = evaluation.samples_per_prompt * len(lengths), max(1, len(traces))
    metrics = {
        "eval/accuracy": sum(accuracy) / wanted,
        "eval/format": sum(outcome.format for outcome in outcomes) / wanted,
        "eval/too_long": float(len(lengths) - len(prompts)),
        "eval/response_tokens_mean": tokens / generated,
        "eval/truncated_fraction": truncated / generated,
    }
    if len(by_source) > 1:
        for name, values in sorted(by_source.items()):
            metrics[f"eval/accuracy_{name}"] = sum(values) / (evaluation.samples_per_prompt * len(values))
    return metrics
