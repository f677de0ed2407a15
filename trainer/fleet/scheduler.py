"""Who samples which unit: a pure state machine, which the head alone runs.

A worker that dies costs what it had not sent. Units are assigned in the order in which they were added, two
to a worker: the one that it samples, and the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from trainer.algorithm.traces import Trace
from trainer.fleet.fleet_records import GivenUnit, RolloutUnit

MOST_QUEUED = 2
MOST_COPIES = 2
"""Workers that may sample one unit at a time."""


@dataclass
class WorkerQueue:
    heartbeat_at: float
    rate: float = 0.0
    """Completions per second; 0 while that is unknown."""
    admitted: bool = True
    """Whether it may have units; else it has a probe, or nothing."""
    queue: list[GivenUnit] = field(default_factory=list)


class Scheduler:
    """Assigns units to workers. A unit is unfinished from `add` to `finish`: it waits while no worker has it
    in its queue, and runs while one or two have."""

    def __init__(self, lost_s: float) -> None:
        """lost_s: seconds without a heartbeat after which a worker is lost."""
        self.lost_s = lost_s
        self.workers: dict[str, WorkerQueue] = {}
        self.unfinished: dict[str, float] = {}
        """Completions of each unit without a result, in the order in which units are assigned."""
        self._turns: dict[str, int] = {}
        self._refused: dict[str, set[str]] = {}
        self.lost = self.duplicated = self.reassigned = 0
        """Workers lost; units assigned to a second worker while a first one has them; units that had to be
        assigned anew."""

    def add(self, units: Mapping[str, float], first: bool = False) -> None:
        """Adds units, with their completions. first: before all that wait already."""
        self.unfinished = {**units, **self.unfinished} if first else {**self.unfinished, **units}
        self._turns |= dict.fromkeys(units, 0)

    def finish(self, unit: str) -> None:
        """Takes note of a unit's result. A second result changes nothing."""
        self.unfinished.pop(unit, None)
        self._turns.pop(unit, None)
        self._refused.pop(unit, None)
        for worker in self.workers.values():
            worker.queue = [given for given in worker.queue if given.unit != unit]

    def requeue(self, given: GivenUnit, name: str) -> int:
        """Lets a unit wait again whose samples cannot be used; returns how many workers have sent such."""
        self.unqueue(given, name)
        if given.unit not in self.unfinished:
            return 0
        self.reassigned += 1
        self._refused.setdefault(given.unit, set()).add(name)
        return len(self._refused[given.unit])

    def unqueue(self, given: GivenUnit, name: str) -> None:
        if worker := self.workers.get(name):
            worker.queue = [queued for queued in worker.queue if queued != given]

    def heartbeat(self, name: str, now: float, rate: float, admitted: bool = True) -> None:
        """Takes note of a worker's heartbeat. admitted: whether a worker may have units that was not there
        before."""
        worker = self.workers.setdefault(name, WorkerQueue(now, admitted=admitted))
        worker.heartbeat_at = now
        worker.rate = rate

    def restart_clocks(self, now: float) -> None:
        """Counts every worker's silence from now: the store was away, so nobody could be seen."""
        for worker in self.workers.values():
            worker.heartbeat_at = now

    def assign_probe(self, name: str, unit: str) -> None:
        """Assigns a unit to one worker alone, which has no other."""
        self.workers[name].queue = [GivenUnit(unit, 1)]

    def remove_worker(self, name: str) -> None:
        if worker := self.workers.pop(name, None):
            self.reassigned += sum(given.unit in self.unfinished for given in worker.queue)

    def schedule(self, now: float, unready: Set[str] = frozenset()) -> dict[str, list[GivenUnit]]:
        """Assigns units; returns the queue of every living worker. unready: units whose weights no worker can
        fetch yet."""
        for name in [
            name for name, worker in self.workers.items() if now - worker.heartbeat_at > self.lost_s
        ]:
            self.remove_worker(name)
            self.lost += 1
        copies = self._copies()
        for unit in self.unfinished:
            if copies[unit] or unit in unready:
                continue
            free = self._fastest_free(unit)
            if free is None:
                break
            self._assign(unit, free)
            copies[unit] = 1
        for name, worker in sorted(self.workers.items()):
            if worker.admitted and not worker.queue and (unit := self._latest_of_others(name, copies)):
                self._assign(unit, name)
                copies[unit] += 1
                self.duplicated += 1
        return {name: list(worker.queue) for name, worker in self.workers.items()}

    def _copies(self) -> dict[str, int]:
        """Workers that have each unfinished unit in their queues; of those that wait, 0."""
        copies = dict.fromkeys(self.unfinished, 0)
        for worker in self.workers.values():
            for given in worker.queue if worker.admitted else ():
                copies[given.unit] += 1
        return copies

    def _assign(self, unit: str, name: str) -> None:
        self._turns[unit] += 1
        self.workers[name].queue.append(GivenUnit(unit, self._turns[unit]))

    def _fastest_free(self, unit: str) -> str | None:
        """The worker that would end this unit first, among those with a place in their queues; None if there
        is none."""
        refused = self._refused.get(unit, set())
        admitted = {name: worker for name, worker in self.workers.items() if worker.admitted}
        free = [name for name, worker in admitted.items() if len(worker.queue) < MOST_QUEUED]
        trusted = [name for name in free if name not in refused]
        # a worker whose samples of this unit were refused gets it again only where there is no other
        if not trusted and any(name not in refused for name in admitted):
            return None
        rates = self._rates()

        def end_s(name: str) -> float:
            queued = sum(self.unfinished[given.unit] for given in admitted[name].queue)
            return (queued + self.unfinished[unit]) / rates[name]

        return min(trusted or free, key=lambda name: (end_s(name), name), default=None)

    def _latest_of_others(self, idle: str, copies: Mapping[str, int]) -> str | None:
        """The unit that its worker would end last, for an idle worker to sample too."""
        rates = self._rates()
        latest: tuple[float, str] | None = None
        for name, worker in self.workers.items():
            queued = 0.0
            for given in worker.queue if worker.admitted else ():
                queued += self.unfinished[given.unit]
                refused = idle in self._refused.get(given.unit, set())
                if name == idle or refused or copies[given.unit] >= MOST_COPIES:
                    continue
                latest = max(latest or (0.0, ""), (queued / rates[name], given.unit))
        return latest[1] if latest else None

    def _rates(self) -> dict[str, float]:
        """Completions per second of every worker; of one that is new, the median of the others."""
        known = sorted(worker.rate for worker in self.workers.values() if worker.rate > 0)
        usual = known[len(known) // 2] if known else 1.0
        return {name: worker.rate or usual for name, worker in self.workers.items()}


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
        self._admitted.add(worker)
        self.end_probe(worker)
        if queued := self._scheduler.workers.get(worker):
            queued.admitted = True
            queued.queue = []  # it may have been lost meanwhile, and have a second probe

    def end_probe(self, worker: str) -> None:
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
