"""Supervised fine-tuning on the rows' worked solutions, on one screen: `python -m trainer.loops.sft --config
run.yaml`.

The gradient of the cross-entropy is that of a policy update on given completions with advantage 1, so the
ranks, the ZeRO-3 policy, the global denominator and the checkpoints are those of GRPO; there is no engine and
no reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from trainer.algorithm.batching import TrainBatch
from trainer.algorithm.traces import ImageRef, Trace, completed_trace
from trainer.config import RunConfig
from trainer.data.processor import Prompter
from trainer.data.schema import Row
from trainer.loops.process import main
from trainer.run.session import Session


def train(config: RunConfig, run: Session) -> None:
    """Runs to the last step. The next step's rows are read while the ranks compute."""
    phases, prompter = run.phases, Prompter(config.model)
    total, step = total_updates(config, len(run.train_rows)), run.resume().step
    print(describe_batch(config, total, run.learner.facts.micro_batch_tokens), flush=True)
    held_out = HeldOut(config, run, prompter) if config.evaluation.every_steps else None
    if held_out and step == 0:
        with phases("eval"):
            run.step_log.metrics.log(0, held_out.loss())

    def read(step: int) -> TrainBatch:
        rows = [prompt.row for prompt in run.stream.batch(step)]
        traces = [solution_trace(prompter, row, run.train_set[row]) for row in rows]
        return TrainBatch(traces, [np.ones(len(trace.learned), np.float32) for trace in traces])

    reader = ThreadPoolExecutor(1, "rows")
    upcoming = reader.submit(read, step + 1)
    while step < total:
        step += 1
        run.begin(step, total)
        with phases("update"):
            batch = upcoming.result()
            upcoming = reader.submit(read, step + 1)
            stats = describe_step(batch.traces, run.learner.update(batch))
        if held_out and run.due(config.evaluation.every_steps, step, total):
            with phases("eval"):
                stats |= held_out.loss()
        run.log(step, stats, batch.traces)
        score = -stats["eval/loss"] if "eval/loss" in stats else None
        run.save(step, total, step, {}, score)
    run.finish(step, step, {})


class HeldOut:
    """The rows of the evaluation split, and the policy's loss on them."""

    def __init__(self, config: RunConfig, run: Session, prompter: Prompter) -> None:
        self.learner, self.split = run.learner, config.evaluation_split
        dataset = run.rows.dataset(self.split)
        self.left_out = run.rows.left_out(self.split)
        self.traces = [solution_trace(prompter, row, dataset[row]) for row in run.rows.usable(self.split)]

    def loss(self) -> dict[str, float]:
        """Cross-entropy over all learned tokens."""
        scored = self.learner.logprobs(self.traces, self.split, old=True, reference=False).old
        assert scored is not None
        logprobs = np.concatenate(scored).tolist()
        return {"eval/loss": -sum(logprobs) / len(logprobs), "eval/left_out": float(self.left_out)}


def describe_batch(config: RunConfig, total: int, tokens: int) -> str:
    """What one optimizer step is, in a line."""
    rows, place = config.sft.batch_size, config.placement
    per_rank = f"{rows / place.world_size:g} per rank x {place.workers_per_node} x {place.nodes} nodes"
    return (
        f"batch: {rows} rows per optimizer step = {per_rank}, in passes of up to {tokens} tokens; "
        f"{total} steps under ZeRO-{config.optimizer.zero_stage}"
    )


def total_updates(config: RunConfig, rows: int) -> int:
    """Optimizer steps of the whole run."""
    return config.run.max_steps or rows * config.sft.epochs // config.sft.batch_size


def solution_trace(prompter: Prompter, index: int, row: Row) -> Trace:
    """The row's solution as something to learn from, with the earlier replies that the row asks to be
    learned."""
    return completed_trace(
        prompter.token_ids(row),
        prompter.solution_ids(row),
        group=index,
        row=index,
        learned_earlier=prompter.learned_positions(row),
        images=tuple(ImageRef(index, number) for number in range(len(row.images))),
    )


def describe_step(traces: Sequence[Trace], stats: dict[str, float]) -> dict[str, float]:
    """The step's metrics. stats: those of its update."""
    count = len(traces)
    learned = sum(len(trace.learned) for trace in traces)
    shared = sum(trace.shared for trace in traces)
    metrics = {
        "sft/loss": stats["loss/nll"],
        "loss/token_accuracy": stats["loss/token_accuracy"],
        "entropy/mean": stats["entropy/mean"],
        "tokens/response_mean": learned / count,
        "tokens/prompt_mean": shared / count,
        "tokens/step": sum(len(trace.tokens) for trace in traces),
    }
    for name, value in stats.items():
        if name.startswith(("grad/", "optim/", "perf/", "time/")):
            metrics[name] = value
    return metrics


if __name__ == "__main__":
    main(train, total_updates)
