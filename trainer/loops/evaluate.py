"""Held-out accuracy, with the engine awake from the rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithm.records import Prompt
from trainer.algorithm.seeding import seed_of
from trainer.config import RunConfig

if TYPE_CHECKING:
    from trainer.run.session import Session


def evaluate(config: RunConfig, run: Session) -> dict[str, float]:
    """Generates and grades completions of every held-out row, each time with the same rows and seeds.

    A prompt that is too long for the engine is skipped and counts as wrong: it stays in the denominator.
    """
    e, path = config.evaluation, config.evaluation_path
    dataset = run.dataset(path, e.split)
    lengths = run.lengths(path, e.split, e.max_samples)[:, 0]
    fits = lengths < config.data.prompt_max_tokens + config.rollout.max_tokens  # the engine's longest sequence
    prompts = [Prompt(group=i, row=i, seed=seed_of(config.run.seed, "eval", i)) for i in range(len(lengths)) if fits[i]]
    samples = run.workers.generate(prompts, lengths, e.samples_per_prompt, e.temperature, path, e.split)
    outcomes = run.score(samples, dataset)
    generated, n = max(1, len(samples)), e.samples_per_prompt
    accuracy, form = [0.0] * len(lengths), 0.0
    for sample, outcome in zip(samples, outcomes, strict=True):
        accuracy[sample.row] += outcome.accuracy
        form += outcome.format
    sources = [source.rpartition("/")[2] for source in dataset.column("source")[: len(lengths)]]
    by_source: dict[str, list[float]] = {}
    for source, value in zip(sources, accuracy, strict=True):
        by_source.setdefault(source, []).append(value)
    return {
        "eval/accuracy": sum(accuracy) / (n * len(lengths)),
        "eval/format": form / (n * len(lengths)),
        "eval/too_long": float(len(lengths) - len(prompts)),
        "eval/response_tokens_mean": sum(len(s.token_ids) for s in samples) / generated,
        "eval/truncated_fraction": sum(not s.finished for s in samples) / generated,
    } | {f"eval/accuracy_{name}": sum(v) / (n * len(v)) for name, v in sorted(by_source.items()) if len(by_source) > 1}
