"""Supervised fine-tuning on the rows' worked solutions, on one screen: `python -m trainer.loops.sft --config run.yaml`.

The gradient of the cross-entropy is that of a policy update on given completions with advantage 1, so the workers, the
ZeRO-3 policy, the global denominator and the checkpoints are those of GRPO; there is no engine and no reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from trainer.algorithm.batching import TrainItem
from trainer.config import RunConfig
from trainer.data.processor import Prompter
from trainer.data.schema import Row
from trainer.loops.process import main
from trainer.run.session import Session


def train(config: RunConfig, run: Session) -> None:
    """Runs to the last step. The next step's rows are read while the ranks compute."""
    workers, phases, prompter = run.workers, run.phases, Prompter(config.model)
    total, step = total_updates(config, len(run.rows)), run.resume({})
    read = lambda step: [item(prompter, p.row, run.train_set[p.row]) for p in run.stream.batch(step)]  # noqa: E731
    print(batch(config, total, workers.facts["micro_batch_tokens"]), flush=True)
    held_out = HeldOut(config, run, prompter) if config.evaluation.every_steps else None
    if held_out and step == 0:
        with phases("eval"):
            run.metrics.log(0, held_out.loss())

    reader = ThreadPoolExecutor(1, "rows")
    upcoming = reader.submit(read, step + 1)
    while step < total:
        step += 1
        run.begin(step, total)
        with phases("update"):
            items = upcoming.result()
            upcoming = reader.submit(read, step + 1)
            stats = describe(items, workers.update(items))
        if held_out and run.due(config.evaluation.every_steps, step, total):
            with phases("eval"):
                stats |= held_out.loss()
        run.log(step, stats, items)
        score = -stats["eval/loss"] if "eval/loss" in stats else None
        with phases("checkpoint"):
            run.saving.maybe_save(step, total, {}, step, score)
    run.finish(step, total, {}, step)


class HeldOut:
    """The rows of the evaluation split, and the policy's loss on them."""

    def __init__(self, config: RunConfig, run: Session, prompter: Prompter) -> None:
        self.workers, self.path, self.split = run.workers, config.evaluation_path, config.evaluation.split
        rows, self.left_out = run.usable_rows(self.path, self.split, config.evaluation.max_samples)
        dataset = run.dataset(self.path, self.split)
        self.items = [item(prompter, row, dataset[row]) for row in rows]

    def loss(self) -> dict[str, float]:
        """Cross-entropy over all tokens of the solutions."""
        found = self.workers.with_logprobs(self.items, old=True, reference=False, path=self.path, split=self.split)
        logprobs = [x for i in found for x in i.old_logprobs or ()]
        return {"eval/loss": -sum(logprobs) / len(logprobs), "eval/left_out": float(self.left_out)}


def batch(config: RunConfig, total: int, tokens: int) -> str:
    """What one optimizer step is, in a line."""
    rows, place = config.sft.batch_size, config.placement
    return (
        f"batch: {rows} rows per optimizer step = {rows / place.world_size:g} per rank x {place.workers_per_node} x "
        f"{place.nodes} nodes, in passes of up to {tokens} tokens; {total} steps under "
        f"ZeRO-{config.optimizer.zero_stage}"
    )


def total_updates(config: RunConfig, rows: int) -> int:
    """Optimizer steps of the whole run."""
    return config.run.max_steps or rows * config.sft.epochs // config.sft.batch_size


def item(prompter: Prompter, index: int, row: Row) -> TrainItem:
    """The row's solution as something to learn from, and earlier replies that it asks for."""
    learned = tuple(prompter.learned_positions(row))
    return TrainItem(index, prompter.token_ids(row), prompter.solution_ids(row), 1.0, learned=learned)


def describe(items: Sequence[TrainItem], stats: dict[str, float]) -> dict[str, float]:
    n = len(items)
    return {
        "sft/loss": stats["loss/nll"],
        "loss/token_accuracy": stats["loss/token_accuracy"],
        "entropy/mean": stats["entropy/mean"],
        "tokens/response_mean": sum(i.targets for i in items) / n,
        "tokens/prompt_mean": sum(len(i.prompt_token_ids) for i in items) / n,
        "tokens/step": sum(i.length for i in items),
    } | {name: value for name, value in stats.items() if name.startswith(("grad/", "optim/", "perf/", "time/"))}


if __name__ == "__main__":
    main(train, total_updates)
