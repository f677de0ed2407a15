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

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.algorithm.reward_shaping import LoopState
from trainer.algorithm.staleness import mismatch_by_age, slots_used, versions_behind
from trainer.algorithm.traces import Prompt, Trace
from trainer.checkpoint.rollout_archive import GradedStep
from trainer.config import RunConfig
from trainer.loops.sampling_schedule import training_request

if TYPE_CHECKING:
    from trainer.run.session import Session


class PartialRollouts:
    """The schedule of sampling with `rollout.tokens_per_step`; the loop uses it as it uses
    `SamplingSchedule`. Within a phase, groups count on from the trained step's: with P prompts a step, group
    P is the first of the next step."""

    def __init__(self, config: RunConfig, run: Session, total: int, loop_state: LoopState) -> None:
        """As of `SamplingSchedule`."""
        self.config, self.run = config, run
        self.total, self.loop_state = total, loop_state
        self._size = config.rollout.prompts_per_step
        self._waiting = self._next(run.rollouts.waiting())
        self._logged: dict[int, GradedStep | None] = {}

    def needs_weights(self, step: int) -> bool:
        """Whether the phase of a step samples anything, so that weights must be loaded."""
        if step > self.total:
            return False
        if step not in self._logged:
            self._logged[step] = self.run.rollouts.read(step)
        if self._logged[step] is not None:
            return False
        begun = {step + trace.group // self._size for trace in self._waiting}
        begins = any(due not in begun for due in range(step, self._last(step) + 1))
        return begins or any(trace.end == "cut" for trace in self._waiting)

    def take(self, step: int) -> GradedStep:
        """The step's completions, graded and logged with those of later steps so far."""
        samples = self.needs_weights(step)  # reads the log
        graded = self._logged.pop(step)
        if graded is None:
            graded = self._phase(step, samples)
        self._waiting = self._next(graded.waiting)
        return graded

    def measure(self, step: int, graded: GradedStep) -> dict[str, float]:
        """As of `SamplingSchedule`, on what the step's phase has begun; and `staleness/age_*`, on a group of
        the step per rank."""
        algorithm, ranks = self.config.algorithm, self.config.placement.world_size
        version, traces = step - 1, graded.traces
        fresh = []
        for trace in self._waiting:
            if trace.group % self._size < ranks and trace.versions == (version, version):
                fresh.append(trace)
        measured = versions_behind(traces, step) | self.run.probe.mismatch(fresh)
        old = [trace for trace in traces if trace.group < ranks]
        limits = algorithm.correction_low, algorithm.correction_high
        measured |= mismatch_by_age(old, self.run.probe.policy_logprobs(old), version, *limits)
        carried = [trace for trace in traces if trace.versions[0] < trace.versions[1]]
        measured["rollout/carried_fraction"] = len(carried) / len(traces)
        if used := slots_used([*traces, *self._waiting], version):
            measured["perf/slots_used"] = used
        return measured

    def _last(self, step: int) -> int:
        """The last step of which the phase of a step samples."""
        return min(step + self.config.rollout.staleness, self.total)

    def _next(self, waiting: Sequence[Trace]) -> list[Trace]:
        """Traces of a phase as the next one counts their groups."""
        return [replace(trace, group=trace.group - self._size) for trace in waiting]

    def _phase(self, step: int, samples: bool) -> GradedStep:
        """Samples, grades and logs."""
        run = self.run
        with run.phases("rollout"):
            sampled = self._sample(step) if samples else []
            again = {(trace.group, trace.index) for trace in sampled}
            kept = [trace for trace in self._waiting if (trace.group, trace.index) not in again]
            traces = sorted(sampled + kept, key=lambda trace: (trace.group, trace.index))
        of_step = [trace for trace in traces if trace.group < self._size]
        with run.phases("grade"):
            outcomes = run.score(of_step)
        return run.log_graded(step, of_step, outcomes, traces[len(of_step) :])

    def _sample(self, step: int) -> list[Trace]:
        """What the engines sample of all steps from `step` on, in one call."""
        stream, size = self.run.stream, self._size
        first, last = self.loop_state.prompts, self._last(step)
        prompts: list[Prompt] = []
        for due in range(step, last + 1):
            drawn = stream.draw(first + len(prompts), size, due, len(prompts))
            if due > step:
                limit = self.config.rollout.tokens_per_step
                drawn = [replace(prompt, cut=limit) for prompt in drawn]
            prompts += drawn
        upcoming = stream.draw(first + len(prompts), size, last + 1)
        request = training_request(self.run, step, step - 1, prompts, upcoming, self._waiting)
        return self.run.sampler.sample(request).all()
