"""GRPO of a vision-language model, on one screen: `python -m trainer.loops.grpo --config run.yaml`.

    sample -> grade -> learn -> sync -> evaluate, save, log

With `rollout.staleness` k, what is sampled is for k steps later (trainer/loops/sampling_schedule.py), a piece
of each completion at a time with `rollout.tokens_per_step` (trainer/loops/partial_rollouts.py).
Every step is a function of (config, step, weights): a run that is stopped anywhere and resumed computes the
same values. What is graded is logged, so that a restart repeats updates and samples nothing twice.
"""

from __future__ import annotations

import random

from trainer.algorithm.batching import TrainBatch
from trainer.algorithm.credit import (
    CreditedTraces,
    StepRewards,
    by_token,
    learnable_indices,
    reward_step,
    token_kl,
)
from trainer.algorithm.distillation import add_teacher_advantages, teacher_metrics
from trainer.algorithm.reward_shaping import LoopState
from trainer.algorithm.seeding import seed_of
from trainer.algorithm.staleness import separate_mismatch, versions_behind, young_enough
from trainer.checkpoint.rollout_log import GradedStep
from trainer.config import RunConfig
from trainer.learning.distributed import join_update_stats
from trainer.loops.evaluate import evaluate
from trainer.loops.partial_rollouts import PartialRollouts
from trainer.loops.process import main
from trainer.loops.sampling_schedule import SamplingSchedule
from trainer.observe.step_stats import describe_completions, sample_rows
from trainer.run.session import Session
from trainer.run.shown import ShownImages
from trainer.turns.counts import describe_episodes, names_of
from trainer.turns.environments import tools_of


def train(config: RunConfig, run: Session) -> None:
    """Runs to the last step."""
    learner = run.learner
    sampler = run.sampler
    phases = run.phases
    shown = ShownImages(config)
    total, per_step = total_steps(config, len(run.train_rows)), updates_per_step(config)
    resumed = run.resume()
    step, carried = resumed.step, LoopState.resume(resumed.carried, config, resumed.step)
    if step < total:  # else nothing is sampled, and no worker is needed
        with phases("sync"):
            sampler.rest()
            sampler.load(learner.weights(step))
            run.check_first_sync(step)
    if step == 0 and config.evaluation.every_steps:
        with phases("eval"):
            run.metrics.log(0, evaluate(config, run, step))

    if config.rollout.tokens_per_step:
        ahead = PartialRollouts(config, run, total, carried, step)
    else:
        ahead = SamplingSchedule(config, run, total, carried)
    while step < total:
        step += 1
        run.begin(step, total)
        ahead.ask(step)
        graded = ahead.take(step)
        with phases("update"):
            sampler.rest()
            measured = ahead.measure(step - 1)
            stats, batch = update_policy(config, run, step, graded, carried)
        if config.rollout.staleness:
            stats = separate_mismatch(stats, measured) | versions_behind(graded.traces, step)
        stats |= ahead.slots(step - 1, graded.traces)

        evaluates = run.due(config.evaluation.every_steps, step, total)
        # else nothing is sampled, and no worker that joins must be probed
        if evaluates or ahead.samples(step + 1) or ahead.awaited:
            with phases("sync"):
                sampler.load(learner.weights(step))
        if evaluates:
            with phases("eval"):
                mismatch = ahead.probe(step)
                stats |= evaluate(config, run, step) | mismatch()
        run.log(step, stats, batch.traces, sample_rows(config, run.train_set, step, batch, shown.of))
        run.save(step, total, step * per_step, carried.state(), stats.get("eval/accuracy"))
    run.finish(step, step * per_step, carried.state())


def updates_per_step(config: RunConfig) -> int:
    """Optimizer steps per rollout."""
    return config.algorithm.epochs * config.samples_per_step // config.samples_per_update


def total_steps(config: RunConfig, rows: int) -> int:
    """Rollouts of the whole run over `rows` rows."""
    return config.run.max_steps or rows * config.data.episodes // config.rollout.prompts_per_step


def total_updates(config: RunConfig, rows: int) -> int:
    """Optimizer steps of the whole run."""
    return total_steps(config, rows) * updates_per_step(config)


def update_policy(
    config: RunConfig, run: Session, step: int, graded: GradedStep, carried: LoopState
) -> tuple[dict[str, float], CreditedTraces]:
    """The step's optimizer updates: `epochs` passes over its traces, `samples_per_update` at a time.

    Returns the step's metrics, and what was trained on.
    """
    algorithm = config.algorithm
    credit = reward_step(config, graded.traces, graded.outcomes)
    members = credit.members(config.rollout.prompts_per_step)
    if config.teaches and graded.teacher is None:
        graded = run.ask_teacher(step, graded, members)
    batch, trained = prepare_traces(config, run, graded, credit, members, carried)

    lessons = batch
    if algorithm.max_token_age:
        lessons = young_enough(batch, step - 1 - algorithm.max_token_age)
    kept = set(learnable_indices(lessons.traces, algorithm.mask_truncated))
    stats, tokens = [], []
    for epoch in range(algorithm.epochs):
        order = list(range(len(batch)))
        random.Random(seed_of(config.run.seed, "minibatch", step, epoch)).shuffle(order)
        for start in range(0, len(order), config.samples_per_update):
            drawn = order[start : start + config.samples_per_update]
            update = lessons.pick([i for i in drawn if i in kept])
            stats.append(run.learner.update(update, 0.0 if config.kl_in_reward else carried.kl_coef))
            tokens.append(update.tokens)

    metrics = join_update_stats(stats, tokens) | graded.stats
    if algorithm.max_token_age:
        metrics["tokens/too_old_fraction"] = 1 - lessons.tokens / batch.tokens
    if not algorithm.kl_coef:
        metrics.pop("kl/mean", None)  # there is no reference
    metrics |= describe_completions(graded.traces, graded.outcomes) | credit.describe(config, members)
    if config.turns.environment != "off":
        metrics |= describe_episodes(graded.traces, names_of(tools_of(config.turns)))
    if graded.teacher is not None and batch.old is not None:
        judged = [graded.teacher[members[i]] for i in sorted(kept)]
        metrics |= teacher_metrics(judged, [batch.old[i] for i in sorted(kept)])
    metrics |= carried.stepped(config, metrics, run.stream.levels, len(credit.flat), len(batch))
    return metrics, trained


def prepare_traces(
    config: RunConfig,
    run: Session,
    graded: GradedStep,
    credit: StepRewards,
    members: list[int],
    carried: LoopState,
) -> tuple[TrainBatch, CreditedTraces]:
    """The members' traces with their advantages and with the log-probabilities that the loss needs."""
    algorithm = config.algorithm
    total = carried(credit.rewards.total) if algorithm.normalize_reward else credit.rewards.total
    traces = [graded.traces[i] for i in members]
    scored = run.learner.logprobs(
        traces, config.train_split, old=config.old_logprobs, reference=bool(algorithm.kl_coef)
    )
    kl = None
    if config.kl_in_reward:
        assert scored.old is not None and scored.reference is not None
        kl = carried.kl_coef * token_kl(config, scored.old, scored.reference)
    advantages = credit.advantages(config, total, members, kl)
    by_trace = by_token(advantages, credit.lengths[members], algorithm.gamma)
    if graded.teacher is not None:
        assert scored.old is not None
        judged = [graded.teacher[i] for i in members]
        by_trace = add_teacher_advantages(by_trace, judged, scored.old, algorithm.teacher_coef)
    batch = TrainBatch(traces, by_trace, scored.old, scored.reference)
    return batch, CreditedTraces(traces, [graded.outcomes[i] for i in members], advantages)


if __name__ == "__main__":
    main(train, total_updates)
