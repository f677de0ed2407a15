"""The schedule of sampling: which step is asked for when, and what is there of it.

With `rollout.staleness` k, step s is sampled with the weights of version max(0, s - 1 - k). A version is the
number of steps that had been done when the weights were taken. So after version v is loaded, step v + 1 + k
is asked for, once; at the start of the run steps 1 to k + 1, all with version 0. No clock decides: what is
sampled is a function of the run's seed and k. With k = 0 every step is sampled with the newest weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.algorithm.credit import prompts_to_refill, reward_step
from trainer.algorithm.reward_shaping import LoopState
from trainer.algorithm.staleness import slots_used, versions_behind
from trainer.algorithm.traces import Outcome, Prompt, Trace
from trainer.checkpoint.rollout_archive import GradedStep
from trainer.config import RunConfig
from trainer.sampling.sampler import SampledGroups, SamplingRequest

if TYPE_CHECKING:
    from trainer.run.session import Session


def training_request(
    run: Session,
    step: int,
    version: int,
    prompts: Sequence[Prompt],
    upcoming: Sequence[Prompt],
    begun: Sequence[Trace] = (),
) -> SamplingRequest:
    """Prompts of a step for the engines, which hold the weights of `version`; see `SamplingRequest`."""
    split, rollout = run.config.train_split, run.config.rollout
    return SamplingRequest(
        kind="train",
        step=step,
        version=version,
        prompts=prompts,
        split=split,
        prompt_tokens=run.rows.prompt_tokens(split),
        samples_per_prompt=rollout.samples_per_prompt,
        temperature=rollout.temperature,
        max_tokens=rollout.max_tokens,
        upcoming=upcoming,
        begun=begun,
    )


class SamplingSchedule:
    """The steps that are asked for and not trained on yet: `rollout.staleness` + 1 at most."""

    def __init__(self, config: RunConfig, run: Session, total: int, loop_state: LoopState) -> None:
        """total: steps of the run. loop_state: the run's, as the step under way finds it."""
        self.config, self.run = config, run
        self.total, self.loop_state = total, loop_state
        self._sampling: dict[int, SampledGroups] = {}
        self._graded: dict[int, GradedStep] = {}

    def needs_weights(self, step: int) -> bool:
        """Whether the weights before a step must be loaded: because something is sampled with them, or
        because workers still sample what was asked for before. One that joins then is probed with the
        learner's own weights."""
        asks = self._lacks(step + self.config.rollout.staleness)
        return asks or (self.run.sampler.overlaps_learning and bool(self._sampling))

    def take(self, step: int) -> GradedStep:
        """The step's completions, graded and logged. Starts to sample what is due with the weights before the
        step; later steps that are whole are graded and logged too."""
        for due in range(step, step + self.config.rollout.staleness + 1):
            if self._lacks(due):
                with self.run.phases(self._phase):
                    self._sampling[due] = self._sample(due, step, 0, self.config.rollout.prompts_per_step)
        for due in sorted(self._sampling):
            if due == step or self._sampling[due].whole:
                self._graded[due] = self._grade(due)
        return self._graded.pop(step)

    def measure(self, step: int, graded: GradedStep) -> dict[str, float]:
        """What the step's completions say of the engines, before its update: how old their weights were, how
        full they were, and how far they are from the policy at its own version (`mismatch/*`), on a few
        groups of a later step, one per rank.

        The last is left out where no later step was sampled with that version. Engines that sample while the
        learner learns are whole at a time that is left to chance: they are compared at evaluations.
        """
        ahead = self.config.rollout.staleness > 0
        measured = versions_behind(graded.traces, step) if ahead else {}
        if self.run.sampler.overlaps_learning:
            return measured
        measured["perf/slots_used"] = slots_used(graded.traces)
        version, ranks = step - 1, self.config.placement.world_size
        fresh = []
        for later in self._graded.values():
            for trace in later.traces:
                if trace.versions == (version, version) and trace.group < ranks:
                    fresh.append(trace)
        return measured | self.run.probe.mismatch(fresh)

    def _lacks(self, step: int) -> bool:
        """Whether a step of the run is neither asked for nor logged."""
        if step > self.total or step in self._sampling or step in self._graded:
            return False
        logged = self.run.rollouts.read(step)
        if logged is None:
            return True
        self._graded[step] = logged
        return False

    @property
    def _phase(self) -> str:
        return "wait" if self.run.sampler.overlaps_learning else "rollout"

    def _sample(self, step: int, next_step: int, done: int, count: int) -> SampledGroups:
        """Starts to sample `count` prompts of a step of which `done` were asked already. next_step: the one
        that is trained next. Steps between the two take `prompts_per_step` prompts each: staleness excludes
        new prompts for groups of equal rewards."""
        stream, size = self.run.stream, self.config.rollout.prompts_per_step
        drawn = self.loop_state.prompts + (step - next_step) * size + done
        prompts = stream.draw(drawn, count, step, done)
        upcoming = stream.draw(drawn + count, size, step + 1)
        return self.run.sampler.sample(training_request(self.run, step, next_step - 1, prompts, upcoming))

    def _grade(self, step: int) -> GradedStep:
        """Waits for a step, grades and logs it; and further prompts while groups of unequal rewards are
        missing."""
        run, config = self.run, self.config
        sampled = self._sampling.pop(step)
        traces: list[Trace] = []
        outcomes: list[Outcome] = []
        missing = 0
        for _ in range(1 + config.algorithm.refill_rounds):
            with run.phases(self._phase):
                if missing:
                    done = len({trace.group for trace in traces})
                    sampled = self._sample(step, step, done, missing)
                more = sampled.all()
            with run.phases("grade"):
                outcomes += run.score(more)
                traces += more
            missing = prompts_to_refill(
                reward_step(config, traces, outcomes).flat, config.rollout.prompts_per_step
            )
            if not missing:
                break
        return run.log_graded(step, traces, outcomes)
