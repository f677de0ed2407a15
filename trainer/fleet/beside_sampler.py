"""`Sampler` of a trainer whose own engines share every step with rollout workers (`fleet.workers=beside`)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer.algorithm.traces import Prompt, Trace
from trainer.fleet.head import FleetGroups, FleetSampler
from trainer.fleet.heartbeat import HEARTBEAT_S
from trainer.fleet.scheduler import Claim, GivenUnit
from trainer.sampling.colocated import Colocated
from trainer.sampling.sampler import SampledGroups, SamplingRequest
from trainer.weights.source import WeightSource


class SharedGroups(SampledGroups):
    """What becomes of an ask whose units both sample."""

    def __init__(self, ask: SamplingRequest, groups: FleetGroups, sampler: BesideSampler) -> None:
        self._ask = ask
        self._shared, self._sampler = groups, sampler

    @property
    def whole(self) -> bool:
        return self._shared.whole

    def all(self) -> list[Trace]:
        self._sampler.share(self._ask, self._shared)
        return self._shared.all()


class BesideSampler:
    """Workers begin as soon as a step is asked for. The trainer's engines take their share of the units, by
    speed, and sample it in one go; then all that no worker has begun. What workers have they sample too, once
    they have waited for it as long as they took for theirs: so a run whose workers are all gone samples by
    itself.

    The engines share their GPUs with the learner, and hold the newest weights only.
    """

    beside = False

    def __init__(self, own: Colocated, fleet: FleetSampler) -> None:
        self.own, self.fleet = own, fleet
        self._took_s = 0.0
        """Seconds that the engines needed for their last share of a step."""

    def load(self, weights: WeightSource) -> None:
        """`Sampler.load`: first to the workers, while the learner's states are still on the GPU."""
        self.fleet.load(weights)
        self.own.load(weights)

    def sample(self, ask: SamplingRequest) -> SampledGroups:
        """`Sampler.sample`. A probe is of the trainer's own engines: workers are probed when they join."""
        if ask.kind == "probe":
            return self.own.sample(ask)
        return SharedGroups(ask, self.fleet.sample(ask), self)

    def share(self, ask: SamplingRequest, groups: FleetGroups) -> None:
        """Samples units of an ask until all of them are there, whoever sampled them."""
        units = {unit.name: unit for unit in groups.units}
        what: Claim = "share"
        idle_since = time.monotonic()
        while not groups.whole:
            self.fleet.meanwhile()
            claimed = self.fleet.dispatcher.claim(what)
            if claimed:
                prompts = {given: units[given.unit].prompts for given in claimed}
                self._sample(ask, prompts, of_share=what == "share")
                idle_since = time.monotonic()
            else:
                self.fleet.pause()
            what = "late" if time.monotonic() - idle_since > self._patience_s() else "rest"

    def _patience_s(self) -> float:
        """How long to wait for a worker's samples before they are sampled here. They come through the bucket,
        which takes some seconds."""
        return max(self._took_s, HEARTBEAT_S) if self._took_s else 0.0

    def _sample(
        self, ask: SamplingRequest, prompts: Mapping[GivenUnit, Sequence[Prompt]], of_share: bool
    ) -> None:
        began = time.monotonic()
        of_group: dict[int, GivenUnit] = {}
        for given, of_unit in prompts.items():
            of_group |= {prompt.group: given for prompt in of_unit}
        mine = replace(
            ask, prompts=[prompt for of_unit in prompts.values() for prompt in of_unit], upcoming=()
        )
        sampled: dict[GivenUnit, list[Trace]] = {given: [] for given in prompts}
        for trace in self.own.sample(mine).all():
            sampled[of_group[trace.group]].append(trace)
        took_s = time.monotonic() - began
        if of_share:
            self._took_s = took_s
        self.fleet.dispatcher.give(sampled, took_s if of_share else None)

    def rest(self) -> None:
        """`Sampler.rest`."""
        self.fleet.rest()
        self.own.rest()

    def close(self) -> None:
        """`Sampler.close`."""
        self.fleet.close()
