"""The schedule of sampling: which step is asked for when, and what is there of it.

With `rollout.staleness` k, step s is sampled with the weights of version max(0, s - 1 - k). A version is the
number of steps that had been done when the weights were taken. So after version v is loaded, step v + 1 + k
is asked for, once; at the start of the run steps 1 to k + 1, all with version 0. No clock decides: what is
sampled is a function of the run's seed and k. With k = 0 every step is sampled with the newest weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from trainer.algorithm.credit import reward_step
from trainer.algorithm.dynamic_sampling import prompts_to_refill
from trainer.algorithm.reward_shaping import LoopState
from trainer.algorithm.staleness import kernel_mismatch, slots_used
from trainer.algorithm.traces import Outcome, Trace
from trainer.checkpoint.rollout_log import GradedStep
from trainer.config import RunConfig
from trainer.run.probe import ask_probe
from trainer.sampling.sampler import SampledGroups, SamplingRequest

if TYPE_CHECKING:
    from trainer.run.session import Session


def fresh_mismatch(run: Session, fresh: list[Trace]) -> dict[str, float]:
    """`mismatch/*` of traces that the policy's current weights sampled."""
    return kernel_mismatch(fresh, score_by_policy(run, fresh))


def score_by_policy(run: Session, traces: list[Trace]) -> list[np.ndarray]:
    """The policy's log-probabilities of the learned tokens, [T] per trace."""
    found = run.learner.logprobs(traces, run.config.train_split, old=True, reference=False)
    assert found.old is not None
    return found.old


class SamplingSchedule:
    """The steps that are asked for and not trained on yet: `rollout.staleness` + 1 at most."""

    def __init__(self, config: RunConfig, run: Session, total: int, carried: LoopState) -> None:
        """total: steps of the run. carried: the run's, as the step under way finds it."""
        self.config, self.run = config, run
        self.total, self.carried = total, carried
        self._asked: dict[int, SampledGroups] = {}
        self._graded: dict[int, GradedStep] = {}

    def samples(self, step: int) -> bool:
        """Whether anything is sampled with the weights before a step, so that they must be loaded."""
        return self.lacks(step + self.config.rollout.staleness)

    def lacks(self, step: int) -> bool:
        """Whether a step of the run is neither asked for nor logged."""
        if step > self.total or step in self._asked or step in self._graded:
            return False
        logged = self.run.rollouts.read(step)
        if logged is None:
            return True
        self._graded[step] = logged
        return False

    @property
    def awaited(self) -> bool:
        """Whether workers sample a step that was asked for. One that joins then is probed with the learner's
        own weights, so these are published, also where no further step is sampled with them."""
        return self.run.sampler.beside and bool(self._asked)

    def ask(self, step: int) -> None:
        """Before step `step`: starts to sample what is due with the weights of the step before it."""
        for due in range(step, step + self.config.rollout.staleness + 1):
            if self.lacks(due):
                with self.run.phases(self._phase):
                    self._asked[due] = self._sample(due, step, 0, self.config.rollout.prompts_per_step)

    def take(self, step: int) -> GradedStep:
        """The step's completions, graded and logged. Later steps that are whole are graded and logged too."""
        for due in sorted(self._asked):
            if due == step or self._asked[due].whole:
                self._graded[due] = self._grade(due)
        return self._graded.pop(step)

    def measure(self, version: int) -> dict[str, float]:
        """`mismatch/*`: how far engine and policy are apart at the policy's own version, on a few groups of a
        later step, one per rank.

        Empty where no later step was sampled with it, and for a sampler beside the learner, whose later steps
        are whole at a time that is left to chance: it is probed at evaluations (`probe`).
        """
        fresh = []
        for graded in self._graded.values():
            for trace in graded.traces:
                if trace.versions == (version, version) and trace.group < self.config.placement.world_size:
                    fresh.append(trace)
        if not fresh or self.run.sampler.beside:
            return {}
        return fresh_mismatch(self.run, fresh)

    def slots(self, version: int, traces: list[Trace]) -> dict[str, float]:
        """`perf/slots_used` of the rollout that sampled a step's traces; empty for a sampler beside the
        learner, whose workers sample a unit at a time."""
        return {} if self.run.sampler.beside else {"perf/slots_used": slots_used(traces)}

    def probe(self, version: int) -> Callable[[], dict[str, float]]:
        """Where a sampler beside the learner samples ahead: asks for a few short completions of `version`,
        which is both the policy's and the newest that was loaded. Returns what waits for them and compares
        the two, as `measure` does."""
        run = self.run
        if not (run.sampler.beside and self.config.rollout.staleness):
            return dict
        asked = ask_probe(self.config, run.sampler, run.rows, version)
        return lambda: fresh_mismatch(run, asked.all())

    @property
    def _phase(self) -> str:
        return "wait" if self.run.sampler.beside else "rollout"

    def _sample(self, step: int, next_step: int, done: int, count: int) -> SampledGroups:
        """Starts to sample `count` prompts of a step of which `done` were asked already.

        next_step: the one that is trained next. Steps between the two take `prompts_per_step` prompts each:
        staleness excludes new prompts for groups of equal rewards.
        """
        config, stream = self.config, self.run.stream
        rollout = config.rollout
        size = rollout.prompts_per_step
        asked = self.carried.prompts + (step - next_step) * size + done
        ask = SamplingRequest(
            kind="train",
            step=step,
            version=next_step - 1,
            prompts=stream.draw(asked, count, step, done, self.carried.level),
            split=config.train_split,
            prompt_tokens=self.run.rows.prompt_tokens(config.train_split),
            samples_per_prompt=rollout.samples_per_prompt,
            temperature=rollout.temperature,
            max_tokens=rollout.max_tokens,
            upcoming=stream.draw(asked + count, size, step + 1, level=self.carried.level),
        )
        return self.run.sampler.sample(ask)

    def _grade(self, step: int) -> GradedStep:
        """Waits for a step, grades and logs it; and further prompts while groups of unequal rewards are
        missing."""
        run, config = self.run, self.config
        sampled = self._asked.pop(step)
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
        return run.keep(step, traces, outcomes)
