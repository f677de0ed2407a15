"""Rollouts that are carried over: no phase waits for the longest completion of a later step.

With `rollout.tokens_per_step` L and `rollout.staleness` k, the rollout phase before step s has the weights of
version s - 1. Step s + k is begun in it, and what is unfinished of the steps s to s + k - 1 goes on, in one
call of the engines. A completion of step s is sampled to its end, any other grows by at most L tokens. (At
the start of the run the first phase begins the steps 1 to k + 1.) So a step trains on the rows that the
data's order says, short and long completions alike, and what is sampled is a function of the run's seed, k
and L.

A phase is logged whole, as the rollout log of its step: that step's graded completions, and those of later
steps so far. It is there before the update, so a restart samples no token twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.algorithm.reward_shaping import LoopState
from trainer.algorithm.staleness import mismatch_by_age, slots_used
from trainer.algorithm.traces import Trace
from trainer.checkpoint.rollout_log import GradedStep
from trainer.config import RunConfig
from trainer.loops.sampling_schedule import fresh_mismatch, score_by_policy
from trainer.sampling.sampler import SamplingRequest

if TYPE_CHECKING:
    from trainer.run.session import Session


class PartialRollouts:
    """The schedule of sampling with `rollout.tokens_per_step`; the loop uses it as it uses
    `SamplingSchedule`.

    Within a phase, groups count on from the trained step's: with P prompts a step, group P is the first of
    the next step.
    """

    awaited = False

    def __init__(self, config: RunConfig, run: Session, total: int, carried: LoopState, step: int) -> None:
        """total: steps of the run. carried: the run's, as the step under way finds it. step: the last one
        that is done."""
        self.config, self.run = config, run
        self.total, self.carried = total, carried
        self._waiting = self._next(run.rollouts.waiting(step))
        self._taken: Sequence[Trace] = ()
        self._logged: dict[int, GradedStep | None] = {}

    def samples(self, step: int) -> bool:
        """Whether the phase of a step samples anything, so that weights must be loaded."""
        if step > self.total:
            return False
        if step not in self._logged:
            self._logged[step] = self.run.rollouts.read(step)
        if self._logged[step] is not None:
            return False
        begins = bool(self._begun_in(step))
        return begins or any(trace.end == "cut" for trace in self._waiting)

    def ask(self, step: int) -> None:
        """Nothing: colocated engines sample when a step is taken."""

    def take(self, step: int) -> GradedStep:
        """The step's completions, graded and logged with those of later steps so far."""
        self.samples(step)  # reads the log
        graded = self._logged.pop(step)
        if graded is None:
            graded = self._phase(step)
        self._waiting = self._next(graded.waiting)
        self._taken = graded.traces
        return graded

    def measure(self, version: int) -> dict[str, float]:
        """`Ahead.measure`, on what the step's phase has begun; `staleness/age_*`, on a group of the step per
        rank."""
        algorithm, few = self.config.algorithm, self.config.placement.world_size
        size = self.config.rollout.prompts_per_step
        fresh = []
        for trace in self._waiting:
            if trace.group % size < few and trace.versions == (version, version):
                fresh.append(trace)
        out = fresh_mismatch(self.run, fresh) if fresh else {}
        old = [trace for trace in self._taken if trace.group < few]
        limits = algorithm.correction_low, algorithm.correction_high
        out |= mismatch_by_age(old, score_by_policy(self.run, old), version, *limits)
        carried = [trace for trace in self._taken if trace.versions[0] < trace.versions[1]]
        out["rollout/carried_fraction"] = len(carried) / len(self._taken)
        return out

    def slots(self, version: int, traces: list[Trace]) -> dict[str, float]:
        """`perf/slots_used` of the step's phase; empty if it had nothing to sample."""
        used = slots_used([*traces, *self._waiting], version)
        return {"perf/slots_used": used} if used else {}

    def probe(self, version: int) -> Callable[[], dict[str, float]]:
        """Nothing: `measure` does."""
        return dict

    def _next(self, waiting: Sequence[Trace]) -> list[Trace]:
        """Traces of a phase as the next one counts their groups."""
        size = self.config.rollout.prompts_per_step
        return [replace(trace, group=trace.group - size) for trace in waiting]

    def _begun_in(self, step: int) -> list[int]:
        """Steps that the phase of `step` begins."""
        size = self.config.rollout.prompts_per_step
        begun = {step + trace.group // size for trace in self._waiting}
        last = min(step + self.config.rollout.staleness, self.total)
        return [due for due in range(step, last + 1) if due not in begun]

    def _phase(self, step: int) -> GradedStep:
        """Samples, grades and logs."""
        run, size = self.run, self.config.rollout.prompts_per_step
        with run.phases("rollout"):
            sampled = self._sample(step) if self.samples(step) else []
            again = {(trace.group, trace.index) for trace in sampled}
            traces = sampled + [one for one in self._waiting if (one.group, one.index) not in again]
            traces.sort(key=lambda trace: (trace.group, trace.index))
        mine = [trace for trace in traces if trace.group < size]
        with run.phases("grade"):
            outcomes = run.score(mine)
        return run.keep(step, mine, outcomes, traces[len(mine) :])

    def _sample(self, step: int) -> list[Trace]:
        """What the engines sample of all steps from `step` on, in one call."""
        config, stream = self.config, self.run.stream
        rollout = config.rollout
        size = rollout.prompts_per_step
        last = min(step + rollout.staleness, self.total)
        prompts = []
        for due in range(step, last + 1):
            before = (due - step) * size
            drawn = stream.draw(self.carried.prompts + before, size, due, before)
            if due > step:
                drawn = [replace(prompt, cut=rollout.tokens_per_step) for prompt in drawn]
            prompts += drawn
        ask = SamplingRequest(
            kind="train",
            step=step,
            version=step - 1,
            prompts=prompts,
            split=config.train_split,
            prompt_tokens=self.run.rows.prompt_tokens(config.train_split),
            samples_per_prompt=rollout.samples_per_prompt,
            temperature=rollout.temperature,
            max_tokens=rollout.max_tokens,
            upcoming=stream.draw(self.carried.prompts + len(prompts), size, last + 1),
            begun=self._waiting,
        )
        return self.run.sampler.sample(ask).all()
