"""Which workers may sample. Every new one samples a probe before anything else, and the learner scores it
with the same weights: so the head knows whether the worker's engine is the policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.algorithm.traces import Trace
from trainer.fleet.dispatch import Dispatcher
from trainer.sampling.sampler import SamplingRequest

PROBE_S = 60.0
"""Longest time that the trainer waits for a worker's probe where it has no other reason to wait."""


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


class WorkerAdmission:
    """Admits workers by their probes, from the trainer's own thread while it waits: the learner scores them
    with the weights that it holds."""

    def __init__(self, test: AdmissionTest | None, dispatcher: Dispatcher) -> None:
        """test: None where all workers may sample."""
        self._test, self._dispatcher = test, dispatcher
        self.learner_holds_newest = False
        """Whether the learner holds the newest version that was published, of which the probes are."""
        self._waited_s: dict[str, float] = {}
        """How long the trainer has waited for each worker's probe."""

    def probe_request(self, version: int) -> SamplingRequest | None:
        """What workers that join sample of a version; None where they are not probed."""
        return self._test.ask(version) if self._test else None

    def judge_probes(self) -> None:
        """Admits workers whose probe is the policy's, and turns the others away."""
        if self._test is None or not self.learner_holds_newest:
            return
        for worker, device, traces in self._dispatcher.probed():
            if why := self._test.refusal(traces, device):
                self._dispatcher.turn_away(worker, why)
            else:
                self._dispatcher.admit(worker)

    def await_probes(self, meanwhile: Callable[[], None]) -> None:
        """Waits a while for workers that are being probed: their probes are of the weights that the learner
        holds now, and a trainer that never waits would admit nobody. meanwhile: called at every news."""
        while self.learner_holds_newest and (names := self._worth_waiting_for()):
            began = time.monotonic()
            self._dispatcher.pause()
            meanwhile()
            for name in names:
                self._waited_s[name] = self._waited_s.get(name, 0.0) + time.monotonic() - began

    def _worth_waiting_for(self) -> list[str]:
        """Workers that are being probed and were not waited for too long."""
        return [name for name in self._dispatcher.probing() if self._waited_s.get(name, 0.0) < PROBE_S]
