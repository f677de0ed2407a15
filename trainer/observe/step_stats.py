"""Reduces a step to its metrics and to rows of the sample table, by pure functions of its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

from trainer.algorithm.credit import CreditedTraces
from trainer.algorithm.traces import Outcome, Trace, Verdict
from trainer.config import RunConfig
from trainer.data.dataset import Dataset
from trainer.data.schema import question_text
from trainer.hardware.flops import CompletedSequence, image_grids, step_metrics
from trainer.hardware.model_shapes import Shape


def describe_completions(traces: Sequence[Trace], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Rewards, verdicts and lengths of all completions of one step."""
    n = len(traces)
    lengths = [len(trace.completion) for trace in traces]
    prompts = [trace.shared for trace in traces]
    rewards = [outcome.reward for outcome in outcomes]
    right = sum(outcome.accuracy for outcome in outcomes)
    well_formed = sum(outcome.format for outcome in outcomes)
    cut = sum(not trace.finished for trace in traces)
    unsound = sum(not trace.sound for trace in traces)
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    mean = sum(rewards) / n
    squares = sum((reward - mean) ** 2 for reward in rewards)
    return {
        "reward/mean": mean,
        "reward/std": (squares / max(n - 1, 1)) ** 0.5,
        "reward/largest": max(map(abs, rewards)),
        "reward/accuracy": right / n,
        "reward/format": well_formed / n,
        **{f"reward/{verdict}_rate": verdicts[verdict] / n for verdict in get_args(Verdict)},
        "tokens/response_mean": sum(lengths) / n,
        "tokens/response_max": max(lengths),
        "tokens/response_min": min(lengths),
        "tokens/prompt_mean": sum(prompts) / n,
        "tokens/prompt_max": max(prompts),
        "tokens/step": sum(lengths) + sum(prompts),
        "tokens/truncated_fraction": cut / n,
        "rollout/not_finite": float(unsound),
    }


def throughput(stats: dict[str, float], times: dict[str, float], gpus: int) -> dict[str, float]:
    """Tokens per second: completions in the rollout, all tokens in the update and in the whole step per GPU.
    gpus: of the run's own nodes, those that only sample among them; processes, on CPU."""
    total = stats.get("tokens/step", 0.0)
    prompt = stats.get("tokens/prompt_mean", 0.0)
    completion = stats.get("tokens/response_mean", 0.0)
    out = {"perf/tokens_per_s_per_gpu": total / times["time/step_s"] / gpus}
    if times.get("time/rollout_s") and prompt + completion:
        out["perf/rollout_tokens_per_s"] = (
            total * completion / (prompt + completion) / times["time/rollout_s"]
        )
    if times.get("time/update_s"):
        out["perf/train_tokens_per_s"] = total / times["time/update_s"]
    return out


def utilisation(
    config: RunConfig,
    shapes: Sequence[Shape],
    peak: float,
    image_token_id: int,
    traces: Sequence[Trace],
    times: dict[str, float],
) -> dict[str, float]:
    """Model and hardware FLOPs utilization per phase. `peak` is that of one GPU, in FLOP/s. shapes: the
    policy's, and the teacher's where there is one."""
    sequences = []
    for trace in traces:
        grids = image_grids(trace.prompt.tolist(), image_token_id)
        sequences.append(CompletedSequence(trace.shared, len(trace.completion), grids, trace.row))
    grpo = config.method == "grpo"
    algorithm = config.algorithm
    return step_metrics(
        shapes[0],
        sequences,
        times,
        config.placement.world_size,
        peak,
        epochs=algorithm.epochs if grpo else 1,
        reference=grpo and bool(algorithm.kl_coef),
        old_logprobs=grpo and config.old_logprobs,
        teacher=shapes[1] if len(shapes) > 1 else None,
        recompute=config.model.gradient_checkpointing,
        freeze_vision=not config.tower_trained,
        adapters=bool(config.lora.rank),
        shared_prompts=config.rollout.prefix_caching,
    )


def sample_rows(
    config: RunConfig,
    dataset: Dataset,
    step: int,
    batch: CreditedTraces,
    shown_in: Callable[[Trace], list[list[bytes]]],
) -> list[dict[str, Any]]:
    """A few of the completions trained on with their images, spread over the groups; [] where none are
    due. shown_in: images that each observation of an episode showed."""
    log = config.logging
    if not log.samples_per_step or (step - 1) % max(log.samples_every_steps, 1):
        return []
    stride = max(len(batch.traces) // log.samples_per_step, 1)
    rows = []
    for i in list(range(0, len(batch.traces), stride))[: log.samples_per_step]:
        trace, outcome = batch.traces[i], batch.outcomes[i]
        row = dataset[trace.row]
        images = list(row.images)
        episode = {}
        if trace.dialog:
            shown = shown_in(trace)
            episode = {"dialog": [*trace.dialog, trace.text], "shown": list(map(len, shown))}
            for files in shown:
                images += files
        rows.append(
            episode
            | {
                "row": trace.row,
                "question": question_text(row.messages),
                "image_pngs": images,
                "completion": trace.transcript,
                "ground_truth": row.answer,
                "verdict": outcome.verdict,
                "rule": outcome.rule,
                "reward": outcome.reward,
                "advantage": float(batch.advantages.values[i]),
                "tokens": len(trace.completion),
            }
        )
    return rows
