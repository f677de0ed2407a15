"""GRPO of a vision-language model, on one screen: `python -m trainer.grpo --config run.yaml`.

    sample -> grade -> learn -> sync -> evaluate, save, log

Every step is a function of (config, step, weights): a run that is stopped anywhere and resumed computes the
same values.
"""

from __future__ import annotations

import random

import torch

from trainer.algorithm.advantages import Advantages, RunningNorm, group_norm
from trainer.algorithm.batching import TrainItem
from trainer.algorithm.records import Sample
from trainer.algorithm.seeding import seed_of
from trainer.config import RunConfig
from trainer.engine.worker_group import over_updates
from trainer.evaluate import evaluate
from trainer.observe.step_stats import describe, sample_rows
from trainer.process import main
from trainer.session import Session


def train(config: RunConfig, run: Session) -> None:
    """Runs to the last step."""
    workers, phases, norm = run.workers, run.phases, RunningNorm()
    total, per_step = total_steps(config, len(run.rows)), updates_per_step(config)
    step = run.resume(norm.__dict__)
    with phases("sync"):
        workers.all("prepare_update")
        workers.all("sync", step)
        run.check_first_sync()
    if step == 0 and config.evaluation.every_steps:
        with phases("eval"):
            run.metrics.log(0, evaluate(config, run))

    while step < total:
        step += 1
        phases.begin(step, total)
        with phases("rollout"):
            samples = workers.generate(
                run.stream.batch(step),
                run.prompt_tokens,
                config.rollout.samples_per_prompt,
                config.rollout.temperature,
                upcoming=run.stream.batch(step + 1),
            )
        with phases("grade"):
            outcomes = run.score(samples)
            rewards = torch.tensor([o.reward for o in outcomes])
            if config.algorithm.normalize_reward:
                rewards = norm(rewards)
            groups = torch.tensor([s.group for s in samples])
            advantages = group_norm(rewards, groups, config.algorithm.advantage_eps)
        with phases("update"):
            workers.all("prepare_update")
            stats = learn(config, run, step, samples, advantages)
        with phases("sync"):
            workers.all("sync", step)
        if run.due(config.evaluation.every_steps, step, total):
            with phases("eval"):
                stats |= evaluate(config, run)
        stats |= describe(samples, outcomes, advantages)
        run.log(step, stats, samples, sample_rows(config, run.train_set, step, samples, outcomes, advantages))
        with phases("checkpoint"):
            run.saving.maybe_save(step, total, norm.__dict__, step * per_step, stats.get("eval/accuracy"))
    run.finish(step, total, norm.__dict__, step * per_step)


def updates_per_step(config: RunConfig) -> int:
    return config.algorithm.epochs * config.samples_per_step // config.samples_per_update


def total_steps(config: RunConfig, rows: int) -> int:
    """Rollouts of the whole run over `rows` rows."""
    return config.run.max_steps or rows * config.data.episodes // config.rollout.prompts_per_step


def total_updates(config: RunConfig, rows: int) -> int:
    """Optimizer steps of the whole run."""
    return total_steps(config, rows) * updates_per_step(config)


def learn(
    config: RunConfig, run: Session, step: int, samples: list[Sample], advantages: Advantages
) -> dict[str, float]:
    """The step's optimizer updates: `epochs` passes over its samples, `samples_per_update` at a time."""
    items = [
        TrainItem(s.row, s.prompt_token_ids, s.token_ids, float(a), s.logprobs)
        for s, a in zip(samples, advantages.values, strict=True)
    ]
    algorithm, size = config.algorithm, config.samples_per_update
    moves = updates_per_step(config) > 1  # the policy, before the step's last update
    items = run.workers.with_logprobs(items, old=moves, reference=bool(algorithm.kl_coef))
    stats, tokens = [], []
    for epoch in range(algorithm.epochs):
        order = list(range(len(items)))
        random.Random(seed_of(config.run.seed, "minibatch", step, epoch)).shuffle(order)
        for start in range(0, len(order), size):
            part = [items[i] for i in order[start : start + size]]
            stats.append(run.workers.update(part))
            tokens.append(sum(len(i.token_ids) for i in part))
    return over_updates(stats, tokens)


if __name__ == "__main__":
    main(train, total_updates)
