"""A step's update of the policy: from graded completions to advantages, from these to new weights."""

from __future__ import annotations

import random

from trainer.algorithm.batching import TrainBatch
from trainer.algorithm.credit import (
    CreditedTraces,
    StepRewards,
    add_teacher_advantages,
    by_token,
    learnable_indices,
    reward_step,
    teacher_metrics,
    token_kl,
)
from trainer.algorithm.reward_shaping import LoopState
from trainer.algorithm.seeding import seed_of
from trainer.checkpoint.rollout_archive import GradedStep
from trainer.config import RunConfig
from trainer.learning.distributed import join_update_stats
from trainer.observe.step_stats import describe_completions
from trainer.run.session import Session
from trainer.turns.counts import describe_episodes, names_of
from trainer.turns.environments import tools_of


def update_policy(
    config: RunConfig, run: Session, step: int, graded: GradedStep, loop_state: LoopState
) -> tuple[dict[str, float], CreditedTraces]:
    """The step's optimizer updates: `epochs` passes over its traces, `samples_per_update` at a time. Returns
    the step's metrics, and what was trained on."""
    algorithm = config.algorithm
    credit = reward_step(config, graded.traces, graded.outcomes)
    members = credit.members(config.rollout.prompts_per_step)
    if config.teaches and graded.teacher is None:
        graded = run.ask_teacher(step, graded, members)
    batch, trained = prepare_traces(config, run, graded, credit, members, loop_state)

    trainable = set(learnable_indices(batch.traces, algorithm.mask_truncated))
    stats, tokens = [], []
    for epoch in range(algorithm.epochs):
        order = list(range(len(batch)))
        random.Random(seed_of(config.run.seed, "minibatch", step, epoch)).shuffle(order)
        for start in range(0, len(order), config.samples_per_update):
            drawn = order[start : start + config.samples_per_update]
            update = batch.pick([i for i in drawn if i in trainable])
            stats.append(run.learner.update(update, 0.0 if config.kl_in_reward else loop_state.kl_coef))
            tokens.append(update.tokens)

    metrics = join_update_stats(stats, tokens) | graded.stats
    if not algorithm.kl_coef:
        metrics.pop("kl/mean", None)  # there is no reference
    metrics |= describe_completions(graded.traces, graded.outcomes) | credit.describe(config, members)
    if config.turns.environment != "off":
        metrics |= describe_episodes(graded.traces, names_of(tools_of(config.turns)))
    if graded.teacher is not None and batch.old is not None:
        judged = [graded.teacher[members[i]] for i in sorted(trainable)]
        metrics |= teacher_metrics(judged, [batch.old[i] for i in sorted(trainable)])
    metrics |= loop_state.stepped(config, metrics, len(credit.flat), len(batch))
    return metrics, trained


def prepare_traces(
    config: RunConfig,
    run: Session,
    graded: GradedStep,
    credit: StepRewards,
    members: list[int],
    loop_state: LoopState,
) -> tuple[TrainBatch, CreditedTraces]:
    """The members' traces with their advantages and with the log-probabilities that the loss needs."""
    algorithm = config.algorithm
    total = credit.rewards.total
    if algorithm.normalize_reward:
        total = loop_state.normalize(total)
    traces = [graded.traces[i] for i in members]
    scored = run.learner.logprobs(
        traces, config.train_split, old=config.old_logprobs, reference=bool(algorithm.kl_coef)
    )
    kl = None
    if config.kl_in_reward:
        assert scored.old is not None and scored.reference is not None
        kl = loop_state.kl_coef * token_kl(config, scored.old, scored.reference)
    advantages = credit.advantages(config, total, members, kl)
    by_trace = by_token(advantages, credit.lengths[members], algorithm.gamma)
    if graded.teacher is not None:
        assert scored.old is not None
        judged = [graded.teacher[i] for i in members]
        by_trace = add_teacher_advantages(by_trace, judged, scored.old, algorithm.teacher_coef)
    batch = TrainBatch(traces, by_trace, scored.old, scored.reference)
    return batch, CreditedTraces(traces, [graded.outcomes[i] for i in members], advantages)
