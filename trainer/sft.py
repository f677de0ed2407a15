"""Supervised fine-tuning on the rows' worked answers, on one screen: `python -m trainer.sft --config run.yaml`.

The gradient of the cross-entropy is that of a policy update on given answers with advantage 1, so the workers, the
ZeRO-3 policy, the global denominator and the checkpoints are those of GRPO; there is no engine and no reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from trainer.algorithm.batching import TrainItem
from trainer.config import ConfigError, RunConfig
from trainer.data.processor import Prompter
from trainer.data.prompt_stream import PromptStream
from trainer.data.schema import Row
from trainer.process import main
from trainer.session import Session


def train(config: RunConfig, run: Session) -> None:
    """Runs to the last step."""
    workers, phases, prompter = run.workers, run.phases, Prompter(config.model)
    rows = usable_rows(config, run, prompter)
    stream, total = PromptStream(rows, config.sft.batch_size, config.run.seed), total_updates(config, len(rows))
    answered = lru_cache(maxsize=8192)(lambda row: item(prompter, row, run.train_set[row]))
    step = run.resume({})

    while step < total:
        step += 1
        phases.begin(step, total)
        with phases("update"):
            items = [answered(prompt.row) for prompt in stream.batch(step)]
            stats = workers.update(items)
        run.log(step, describe(items, stats), [])
        with phases("checkpoint"):
            run.saving.maybe_save(step, total, {}, step, None)
    run.finish(step, total, {}, step)


def total_updates(config: RunConfig, rows: int) -> int:
    """Optimizer steps of the whole run."""
    return config.run.max_steps or rows * config.sft.epochs // config.sft.batch_size


def usable_rows(config: RunConfig, run: Session, prompter: Prompter) -> list[int]:
    """Rows that have a worked answer and fit `sft.max_tokens` with it; the others are counted and left out."""
    solutions = run.train_set.column("solution")
    fitting = run.usable_rows()
    solved = [row for row in fitting if solutions[row]]
    if not solved:
        raise ConfigError(
            f"{config.data.path} has no `solution` in split {config.data.split}: SFT needs worked answers"
        )
    prompts = run.workers.prompt_lengths(solved)
    answers = prompter.tokenizer([solutions[row] for row in solved], add_special_tokens=False)["input_ids"]
    usable = [
        row
        for row, prompt, answer in zip(solved, prompts, answers, strict=True)
        if prompt + len(answer) + 1 <= config.sft.max_tokens
    ]
    if len(usable) < len(fitting):
        print(
            f"data: {len(fitting) - len(solved)} rows have no solution and {len(solved) - len(usable)} are over "
            f"{config.sft.max_tokens} tokens with it; all left out",
            flush=True,
        )
    run.left_out += len(fitting) - len(usable)
    return usable


def item(prompter: Prompter, index: int, row: Row) -> TrainItem:
    """The row's worked answer, closed by the end token, as something to learn from."""
    answer = prompter.tokenizer(row.solution, add_special_tokens=False)["input_ids"] + [prompter.eos_token_id]
    # An engine that gave each of its tokens log-probability 0 makes the reported mismatch the cross-entropy.
    return TrainItem(index, prompter.token_ids(row), answer, 1.0, [0.0] * len(answer))


def describe(items: Sequence[TrainItem], stats: dict[str, float]) -> dict[str, float]:
    """The step's metrics."""
    n, answers = len(items), [len(i.token_ids) for i in items]
    return {
        "sft/loss": stats["mismatch/logprob_abs_mean"],
        "entropy/mean": stats["entropy/mean"],
        "tokens/response_mean": sum(answers) / n,
        "tokens/prompt_mean": sum(len(i.prompt_token_ids) for i in items) / n,
        "tokens/step": sum(i.length for i in items),
    } | {name: value for name, value in stats.items() if name.startswith(("grad/", "optim/", "perf/", "time/"))}


if __name__ == "__main__":
    main(train, total_updates)
