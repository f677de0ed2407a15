"""GRPO of a vision-language model, on one screen: `python -m trainer.loops.grpo --config run.yaml`.

    sample -> grade -> learn -> sync -> evaluate, save, log

Every step is a function of (config, step, weights): a run that is stopped anywhere and resumed computes the
same values. What is graded is logged, so that a restart repeats updates and samples nothing twice.
"""

from __future__ import annotations

import math
import random

from trainer.algorithm.batching import TrainItem
from trainer.algorithm.credit import Batch, credited
from trainer.algorithm.records import Outcome, Sample
from trainer.algorithm.refill import shortfall
from trainer.algorithm.seeding import seed_of
from trainer.algorithm.shaping import Carried, next_kl_coef
from trainer.checkpoint.rollout_log import Graded
from trainer.config import RunConfig
from trainer.loops.evaluate import evaluate
from trainer.loops.process import main
from trainer.observe.step_stats import describe, sample_rows
from trainer.ranks.worker_group import over_updates
from trainer.run.session import Session


def train(config: RunConfig, run: Session) -> None:
    """Runs to the last step."""
    workers, phases, carried = run.workers, run.phases, Carried()
    total, per_step = total_steps(config, len(run.rows)), updates_per_step(config)
    step = run.resume(carried.__dict__)
    carried.start(config, step)
    with phases("sync"):
        workers.all("prepare_update")
        workers.all("sync", step)
        run.check_first_sync()
    if step == 0 and config.evaluation.every_steps:
        with phases("eval"):
            run.metrics.log(0, evaluate(config, run))

    graded = run.rollouts.read(step + 1)
    while step < total:
        step += 1
        run.begin(step, total)
        graded = graded or collect(config, run, step, carried)
        with phases("update"):
            workers.all("prepare_update")
            stats, batch = learn(config, run, step, graded, carried)
        graded, evaluates = run.rollouts.read(step + 1), run.due(config.evaluation.every_steps, step, total)
        if graded is None or evaluates:  # else nothing is sampled before the next update
            with phases("sync"):
                workers.all("sync", step)
        if evaluates:
            with phases("eval"):
                stats |= evaluate(config, run)
        run.log(step, stats, batch.samples, sample_rows(config, run.train_set, step, batch))
        with phases("checkpoint"):
            run.saving.maybe_save(step, total, carried.__dict__, step * per_step, stats.get("eval/accuracy"))
    run.finish(step, total, carried.__dict__, step * per_step)


def updates_per_step(config: RunConfig) -> int:
    return config.algorithm.epochs * config.samples_per_step // config.samples_per_update


def total_steps(config: RunConfig, rows: int) -> int:
    """Rollouts of the whole run over `rows` rows."""
    return config.run.max_steps or rows * config.data.episodes // config.rollout.prompts_per_step


def total_updates(config: RunConfig, rows: int) -> int:
    """Optimizer steps of the whole run."""
    return total_steps(config, rows) * updates_per_step(config)


def collect(config: RunConfig, run: Session, step: int, carried: Carried) -> Graded:
    """The step's completions, graded; and those of further prompts while groups of unequal rewards lack."""
    rollout, count = config.rollout, config.rollout.prompts_per_step
    samples: list[Sample] = []
    outcomes: list[Outcome] = []
    for _ in range(1 + config.algorithm.refill_rounds):
        with run.phases("rollout"):
            asked, done = carried.prompts, len({s.group for s in samples})
            more = run.workers.generate(
                run.stream.draw(asked + done, count, step, done),
                run.prompt_tokens,
                rollout.samples_per_prompt,
                rollout.temperature,
                upcoming=run.stream.draw(asked + done + count, rollout.prompts_per_step, step + 1),
            )
        with run.phases("grade"):
            outcomes += run.score(more)
            samples += more
        count = shortfall(credited(config, samples, outcomes).flat, rollout.prompts_per_step)
        if not count:
            break
    return run.keep(step, samples, outcomes)


def learn(
    config: RunConfig, run: Session, step: int, graded: Graded, carried: Carried
) -> tuple[dict[str, float], Batch]:
    """The step's optimizer updates: `epochs` passes over its samples, `samples_per_update` at a time. Returns its
    metrics, and what was trained on."""
    algorithm, size = config.algorithm, config.samples_per_update
    samples, outcomes = graded.samples, graded.outcomes
    credit = credited(config, samples, outcomes)
    total = carried(credit.rewards.total) if algorithm.normalize_reward else credit.rewards.total
    members = credit.members(config.rollout.prompts_per_step)
    items = [TrainItem(s.row, s.prompt_token_ids, s.token_ids, 0.0, s.logprobs) for s in (samples[i] for i in members)]
    items = run.workers.with_logprobs(items, old=config.old_logprobs, reference=bool(algorithm.kl_coef))
    advantages, items = credit.advantages(config, total, members, items, carried.kl_coef)
    batch = Batch([samples[i] for i in members], [outcomes[i] for i in members], advantages)
    stats, tokens = [], []
    for epoch in range(algorithm.epochs):
        order = list(range(len(items)))
        random.Random(seed_of(config.run.seed, "minibatch", step, epoch)).shuffle(order)
        for start in range(0, len(order), size):
            part = [items[i] for i in order[start : start + size]]
            if algorithm.mask_truncated:
                part = [items[i] for i in order[start : start + size] if batch.samples[i].finished]
            stats.append(run.workers.update(part, 0.0 if config.kl_in_reward else carried.kl_coef))
            tokens.append(sum(len(i.token_ids) for i in part))
    found = over_updates(stats, tokens) | graded.stats | describe(samples, outcomes) | credit.describe(config, members)
    carried.prompts += len(credit.flat)
    if algorithm.kl_target:
        found["kl/coef"] = carried.kl_coef
        carried.kl_coef = next_kl_coef(
            carried.kl_coef, found.get("kl/mean", math.nan), algorithm.kl_target, algorithm.kl_horizon, len(items)
        )
    return found, batch


if __name__ == "__main__":
    main(train, total_updates)
