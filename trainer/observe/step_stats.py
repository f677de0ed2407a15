"""What one step is reduced to for the metrics and the sample table: pure functions of its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from trainer.algorithm.batching import TrainItem
from trainer.algorithm.credit import Batch
from trainer.algorithm.records import Outcome, Sample, Verdict
from trainer.config import RunConfig
from trainer.data.dataset import Dataset
from trainer.data.schema import question
from trainer.hardware.flops import Completed, image_grids, step_metrics
from trainer.hardware.model_shapes import Shape


def describe(samples: list[Sample], outcomes: list[Outcome]) -> dict[str, float]:
    """Rewards, verdicts and lengths of all completions of one step."""
    n = len(samples)
    lengths = [len(s.token_ids) for s in samples]
    rewards = [o.reward for o in outcomes]
    mean = sum(rewards) / n
    verdicts = Counter(o.verdict for o in outcomes)
    return {
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / max(n - 1, 1)) ** 0.5,
        "reward/accuracy": sum(o.accuracy for o in outcomes) / n,
        "reward/format": sum(o.format for o in outcomes) / n,
        **{f"reward/{verdict}_rate": verdicts[verdict] / n for verdict in get_args(Verdict)},
        "tokens/response_mean": sum(lengths) / n,
        "tokens/response_max": max(lengths),
        "tokens/response_min": min(lengths),
        "tokens/prompt_mean": sum(len(s.prompt_token_ids) for s in samples) / n,
        "tokens/prompt_max": max(len(s.prompt_token_ids) for s in samples),
        "tokens/step": sum(lengths) + sum(len(s.prompt_token_ids) for s in samples),
        "tokens/truncated_fraction": sum(not s.finished for s in samples) / n,
    }


def throughput(stats: dict[str, float], times: dict[str, float], world_size: int) -> dict[str, float]:
    """Tokens per second: completions in the rollout, all tokens in the update and in the whole step per rank."""
    total = stats.get("tokens/step", 0.0)
    prompt, completion = stats.get("tokens/prompt_mean", 0.0), stats.get("tokens/response_mean", 0.0)
    out = {"perf/tokens_per_s_per_gpu": total / times["time/step_s"] / world_size}
    if times.get("time/rollout_s") and prompt + completion:
        out["perf/rollout_tokens_per_s"] = total * completion / (prompt + completion) / times["time/rollout_s"]
    if times.get("time/update_s"):
        out["perf/train_tokens_per_s"] = total / times["time/update_s"]
    return out


def utilisation(
    config: RunConfig,
    shape: Shape,
    peak: float,
    image_token_id: int,
    samples: Sequence[Sample | TrainItem],
    times: dict[str, float],
) -> dict[str, float]:
    """Model and hardware FLOPs utilisation per phase. peak: of one GPU, FLOP/s."""
    sequences = [
        Completed(len(s.prompt_token_ids), len(s.token_ids), image_grids(s.prompt_token_ids, image_token_id), s.row)
        for s in samples
    ]
    grpo = config.method == "grpo"
    algorithm = config.algorithm
    return step_metrics(
        shape,
        sequences,
        times,
        config.placement.world_size,
        peak,
        epochs=algorithm.epochs if grpo else 1,
        reference=grpo and bool(algorithm.kl_coef),
        old_logprobs=grpo and config.old_logprobs,
        recompute=config.model.gradient_checkpointing,
        freeze_vision=not config.tower_trained,
        adapters=bool(config.lora.rank),
        shared_prompts=config.rollout.prefix_caching,
    )


def sample_rows(config: RunConfig, dataset: Dataset, step: int, batch: Batch) -> list[dict[str, Any]]:
    """A few of the completions trained on with their images, spread over the groups; [] where none are due."""
    log = config.logging
    if not log.samples_per_step or (step - 1) % max(log.samples_every_steps, 1):
        return []
    samples, advantages = batch.samples, batch.advantages
    stride = max(len(samples) // log.samples_per_step, 1)
    rows = []
    for i in list(range(0, len(samples), stride))[: log.samples_per_step]:
        sample, outcome, row = samples[i], batch.outcomes[i], dataset[samples[i].row]
        rows.append(
            {
                "row": sample.row,
                "question": question(row.messages),
                "image_pngs": row.images,
                "completion": sample.text,
                "ground_truth": row.answer,
                "verdict": outcome.verdict,
                "reward": outcome.reward,
                "advantage": float(advantages.values[i]),
                "tokens": len(sample.token_ids),
            }
        )
    return rows


def one_line(step: int, stats: dict[str, float]) -> str:
    """The step in one line of the log."""
    parts = [f"step {step}"]
    for label, name, form in (
        ("reward", "reward/mean", ".3f"),
        ("acc", "reward/accuracy", ".3f"),
        ("loss", "loss/total", ".4f"),
        ("loss", "sft/loss", ".4f"),
        ("kl", "kl/mean", ".4f"),
        ("len", "tokens/response_mean", ".1f"),
        ("mismatch", "mismatch/logprob_abs_mean", ".1e"),
        ("eval", "eval/accuracy", ".3f"),
        ("eval", "eval/loss", ".4f"),
        ("s", "time/step_s", ".2f"),
    ):
        if name in stats:
            parts.append(f"{label} {stats[name]:{form}}")
    return "  ".join(parts)
