"""GRPO of a vision-language model, on one screen: `python -m trainer.loops.grpo --config run.yaml`.

    sample -> grade -> learn -> sync -> evaluate, save, log

With `rollout.staleness` k, what is sampled is for k steps later (trainer/loops/sampling_schedule.py), and a
completion may be carried over from one rollout phase to the next (trainer/loops/partial_rollouts.py).
Every step is a function of (config, step, weights): a run that is stopped anywhere and resumed computes the
same values. What is graded is logged, so that a restart repeats updates and samples nothing twice.
"""

from __future__ import annotations

from trainer.algorithm.reward_shaping import LoopState
from trainer.algorithm.staleness import separate_mismatch
from trainer.config import RunConfig
from trainer.loops.evaluate import evaluate
from trainer.loops.partial_rollouts import PartialRollouts
from trainer.loops.policy_update import update_policy
from trainer.loops.process import main
from trainer.loops.sampling_schedule import SamplingSchedule
from trainer.observe.step_stats import sample_rows
from trainer.run.session import Session
from trainer.run.step_log import EpisodeImages


def train(config: RunConfig, run: Session) -> None:
    """Runs to the last step."""
    learner, sampler = run.learner, run.sampler
    phases = run.phases
    images = EpisodeImages(config)
    total, per_step = total_steps(config, len(run.train_rows)), updates_per_step(config)
    resumed = run.resume()
    step, loop_state = resumed.step, LoopState.resume(resumed.loop_state, config, resumed.step)
    if step < total:  # else nothing is sampled, and no worker is needed
        with phases("sync"):
            sampler.rest()
            sampler.load(learner.weights(step))
            run.check_first_sync(step)
    if step == 0 and config.evaluation.every_steps:
        with phases("eval"):
            run.step_log.metrics.log(0, evaluate(config, run, step))

    make = PartialRollouts if config.carries_over else SamplingSchedule
    schedule = make(config, run, total, loop_state)
    while step < total:
        step += 1
        run.begin(step, total)
        graded = schedule.take(step)
        with phases("update"):
            sampler.rest()
            measured = schedule.measure(step, graded)
            stats, batch = update_policy(config, run, step, graded, loop_state)
        stats = separate_mismatch(stats, measured) if config.rollout.staleness else stats | measured

        evaluates = run.due(config.evaluation.every_steps, step, total)
        if evaluates or schedule.needs_weights(step + 1):
            with phases("sync"):
                sampler.load(learner.weights(step))
        if evaluates:
            with phases("eval"):
                stats |= evaluate(config, run, step)
        run.log(step, stats, batch.traces, sample_rows(config, run.train_set, step, batch, images.of))
        run.save(step, total, step * per_step, loop_state.state(), stats.get("eval/accuracy"))
    run.finish(step, step * per_step, loop_state.state())


def updates_per_step(config: RunConfig) -> int:
    """Optimizer steps per rollout."""
    return config.algorithm.epochs * config.samples_per_step // config.samples_per_update


def total_steps(config: RunConfig, rows: int) -> int:
    """Rollouts of the whole run over `rows` rows."""
    return config.run.max_steps or rows * config.data.episodes // config.rollout.prompts_per_step


def total_updates(config: RunConfig, rows: int) -> int:
    """Optimizer steps of the whole run."""
    return total_steps(config, rows) * updates_per_step(config)


if __name__ == "__main__":
    main(train, total_updates)
