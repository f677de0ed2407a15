"""Which workers may sample. Every new one samples a probe before anything else, and the learner scores it
with the same weights: so the head knows whether the worker's engine is the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainer.algorithm.traces import Trace
from trainer.fleet.scheduler import Scheduler
from trainer.fleet.units import RolloutUnit
from trainer.sampling.sampler import SamplingRequest


@dataclass(frozen=True)
class AdmissionTest:
    """How workers are probed."""

    ask: Callable[[int], SamplingRequest]
    """What a probe asks of a version of the weights."""
    score: Callable[[Sequence[Trace]], Sequence[np.ndarray]]
    """The learner's log-probabilities of completions, with the weights that it holds."""
    limit: float
    """Mean difference in nats per token beyond which a worker is turned away."""

    def refusal(self, traces: Sequence[Trace], device: str) -> str:
        """Why a worker may not sample, as a sentence; empty where it may. traces: of a probe with the
        learner's weights."""
        gaps = []
        for trace, policy in zip(traces, self.score(traces), strict=True):
            gaps.append(np.abs(policy - trace.logprobs))
        mean = float(np.concatenate(gaps).mean())
        if mean <= self.limit:
            return ""
        return (
            f"on a probe its engine ({device}) and the policy differ by {mean:.2e} nats per token (limit"
            f" {self.limit:.0e}, rollout.sync_tolerance): its weights, kernels or temperature are others"
        )


class Probes:
    """Probes of one attempt, all of the newest version of the weights. Under its dispatcher's lock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._wanted: RolloutUnit | None = None
        """What a worker samples before it is admitted; None: all are admitted."""
        self._given: dict[str, RolloutUnit] = {}
        """The probe that each worker has been given, which is not admitted yet."""
        self._sampled: dict[str, list[Trace]] = {}
        """What they sampled of it."""
        self._admitted: set[str] = set()
        self._number = 0

    def renew(self, unit: RolloutUnit) -> None:
        """From now on workers are probed with this unit; what they sampled of others says nothing."""
        self._wanted = unit
        self._sampled.clear()

    def may_sample(self, worker: str) -> bool:
        """Whether the worker may have units."""
        return self._wanted is None or worker in self._admitted

    def pending(self) -> set[str]:
        """Workers that have a probe, or are about to get one."""
        return {name for name, seen in self._scheduler.workers.items() if not seen.admitted}

    def take(self) -> list[tuple[str, list[Trace]]]:
        """(worker, what it sampled) of the probes that have come in since the last call."""
        found = list(self._sampled.items())
        self._sampled.clear()
        return found

    def admit(self, worker: str) -> None:
        """The worker may have units."""
        self._admitted.add(worker)
        self.drop(worker)
        if seen := self._scheduler.workers.get(worker):
            seen.admitted = True
            seen.queue = []  # it may have been lost meanwhile, and have a second probe

    def drop(self, worker: str) -> None:
        """The worker's probe is over."""
        self._given.pop(worker, None)

    def forget(self, worker: str) -> None:
        """The name is another process's from now on, or nobody's."""
        self._admitted.discard(worker)
        self._sampled.pop(worker, None)
        self.drop(worker)

    def of(self, worker: str, unit: str) -> RolloutUnit | None:
        """The worker's probe, if it has this name."""
        held = self._given.get(worker)
        return held if held is not None and held.name == unit else None

    def came_in(self, worker: str, unit: RolloutUnit, traces: list[Trace]) -> bool:
        """A worker has sampled its probe. Returns whether it is one to score."""
        if self._wanted is None or unit.version != self._wanted.version:
            self.drop(worker)  # the learner has other weights by now: once more
            return False
        self._sampled[worker] = traces
        return True

    def give(self, announced: int) -> None:
        """Gives a probe to every worker that has none of the newest version and is not admitted. announced:
        the newest version that workers can fetch."""
        for name in self._given.keys() - self._scheduler.workers.keys():
            self.drop(name)  # it is lost; where it comes back, it has nothing to do
        if self._wanted is None or self._wanted.version > announced:
            return
        for name, seen in self._scheduler.workers.items():
            held = self._given.get(name)
            if seen.admitted or (held and held.version == self._wanted.version):
                continue
            self._number += 1
            unit = replace(self._wanted, name=f"probe-{self._number:06d}")
            self._given[name] = unit
            self._scheduler.probe(name, unit.name)
