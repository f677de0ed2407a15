"""Held-out accuracy with the engine that is awake anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithm.records import Prompt
from trainer.algorithm.seeding import seed_of
from trainer.config import RunConfig

if TYPE_CHECKING:
    from trainer.session import Session


def evaluate(config: RunConfig, run: Session) -> dict[str, float]:
    """Answers every held-out row and grades it. The same rows and seeds each time, so that scores compare."""
    e = config.evaluation
    dataset = run.dataset(e.path or config.data.path, e.split)
    rows = range(min(len(dataset), e.max_samples) if e.max_samples else len(dataset))
    prompts = [Prompt(group=i, row=row, seed=seed_of(config.run.seed, "eval", row)) for i, row in enumerate(rows)]
    samples = run.workers.generate(prompts, e.samples_per_prompt, e.temperature, e.path or config.data.path, e.split)
    outcomes = run.score(samples, dataset)
    n = len(outcomes)
    by_source: dict[str, list[float]] = {}
    for sample, outcome in zip(samples, outcomes, strict=True):
        by_source.setdefault(dataset[sample.row].source.rpartition("/")[2], []).append(outcome.accuracy)
    return {
        "eval/accuracy": sum(o.accuracy for o in outcomes) / n,
        "eval/format": sum(o.format for o in outcomes) / n,
        "eval/response_tokens_mean": sum(len(s.token_ids) for s in samples) / n,
        "eval/truncated_fraction": sum(not s.finished for s in samples) / n,
    } | {f"eval/accuracy_{name}": sum(v) / len(v) for name, v in sorted(by_source.items()) if len(by_source) > 1}
