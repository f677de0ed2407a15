"""Supervised fine-tuning on the rows' worked solutions, on one screen: `python -m trainer.sft --config run.yaml`.

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
from trainer.process import main
from trainer.session import Session


def train(config: RunConfig, run: Session) -> None:
    """Runs to the last step. The next step's rows are read while the ranks compute."""
    workers, phases, prompter = run.workers, run.phases, Prompter(config.model)
    total, step = total_updates(config, len(run.rows)), run.resume({})
    read = lambda step: [item(prompter, p.row, run.train_set[p.row]) for p in run.stream.batch(step)]  # noqa: E731

    reader = ThreadPoolExecutor(1, "rows")
    upcoming = reader.submit(read, step + 1)
    while step < total:
        step += 1
        phases.begin(step, total)
        with phases("update"):
            items = upcoming.result()
            upcoming = reader.submit(read, step + 1)
            stats = workers.update(items)
        run.log(step, describe(items, stats), [])
        with phases("checkpoint"):
            run.saving.maybe_save(step, total, {}, step, None)
    run.finish(step, total, {}, step)


def total_updates(config: RunConfig, rows: int) -> int:
    """Optimizer steps of the whole run."""
    return config.run.max_steps or rows * config.sft.epochs // config.sft.batch_size


def item(prompter: Prompter, index: int, row: Row) -> TrainItem:
    """The row's solution, closed by the end token, as something to learn from."""
    answer = prompter.tokenizer(row.solution, add_special_tokens=False)["input_ids"] + [prompter.eos_token_id]
    return TrainItem(index, prompter.token_ids(row), answer, 1.0)


def describe(items: Sequence[TrainItem], stats: dict[str, float]) -> dict[str, float]:
    n, answers = len(items), [len(i.token_ids) for i in items]
    return {
        "sft/loss": stats["loss/nll"],
        "entropy/mean": stats["entropy/mean"],
        "tokens/response_mean": sum(answers) / n,
        "tokens/prompt_mean": sum(len(i.prompt_token_ids) for i in items) / n,
        "tokens/step": sum(i.length for i in items),
    } | {name: value for name, value in stats.items() if name.startswith(("grad/", "optim/", "perf/", "time/"))}


if __name__ == "__main__":
    main(train, total_updates)
