"""The probes of one attempt: what every new worker samples before anything else."""

from __future__ import annotations

from dataclasses import replace

from trainer.algorithm.traces import Trace
from trainer.fleet.rollout_units import RolloutUnit
from trainer.fleet.scheduler import Scheduler


class Probes:
    """Probes of one attempt, all of the newest version of the weights. Its dispatcher's lock guards them."""

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
        return {name for name, worker in self._scheduler.workers.items() if not worker.admitted}

    def take_sampled(self) -> list[tuple[str, list[Trace]]]:
        """(worker, what it sampled) of the probes that have come in since the last call."""
        sampled = list(self._sampled.items())
        self._sampled.clear()
        return sampled

    def admit(self, worker: str) -> None:
        """Lets the worker have units."""
        self._admitted.add(worker)
        self.end_probe(worker)
        if queued := self._scheduler.workers.get(worker):
            queued.admitted = True
            queued.queue = []  # it may have been lost meanwhile, and have a second probe

    def end_probe(self, worker: str) -> None:
        """Forgets the worker's probe."""
        self._given.pop(worker, None)

    def forget(self, worker: str) -> None:
        """Forgets who had a name, which is another process's from now on, or nobody's."""
        self._admitted.discard(worker)
        self._sampled.pop(worker, None)
        self.end_probe(worker)

    def probe_of(self, worker: str, unit: str) -> RolloutUnit | None:
        """The worker's probe, if it has this name."""
        probe = self._given.get(worker)
        return probe if probe is not None and probe.name == unit else None

    def keep_sampled(self, worker: str, unit: RolloutUnit, traces: list[Trace]) -> bool:
        """Keeps what a worker sampled of its probe. Returns whether that is to be scored."""
        if self._wanted is None or unit.version != self._wanted.version:
            self.end_probe(worker)  # the learner has other weights by now: once more
            return False
        self._sampled[worker] = traces
        return True

    def assign(self, announced: int) -> None:
        """Gives a probe to every worker that has none of the newest version and is not admitted. announced:
        the newest version that workers can fetch."""
        for name in self._given.keys() - self._scheduler.workers.keys():
            self.end_probe(name)  # it is lost; where it comes back, it has nothing to do
        if self._wanted is None or self._wanted.version > announced:
            return
        for name, worker in self._scheduler.workers.items():
            probe = self._given.get(name)
            if worker.admitted or (probe and probe.version == self._wanted.version):
                continue
            self._number += 1
            unit = replace(self._wanted, name=f"probe-{self._number:06d}")
            self._given[name] = unit
            self._scheduler.assign_probe(name, unit.name)
