"""Who samples which unit: a pure state machine, which the head alone runs.

A worker that dies costs what it had not sent. Units are given out in the order in which they were offered,
two to a worker: the one that it samples, and the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

DEPTH = 2
"""Units that a worker has been given at a time."""
COPIES = 2
"""Workers that may have one unit at a time."""


@dataclass(frozen=True)
class GivenUnit:
    """A unit as it was given to one worker."""

    unit: str
    turn: int
    """How often the unit had been given out by then."""


@dataclass
class SeenWorker:
    """A worker as its heartbeats tell it."""

    at: float
    """When the head saw its newest heartbeat, by the head's clock."""
    rate: float = 0.0
    """Completions per second; 0 while that is unknown."""
    admitted: bool = True
    """Whether it may have units; else it has a probe, or nothing."""
    queue: list[GivenUnit] = field(default_factory=list)


class Scheduler:
    """lost_s: seconds without a heartbeat after which a worker is lost."""

    def __init__(self, lost_s: float) -> None:
        self.lost_s = lost_s
        self.workers: dict[str, SeenWorker] = {}
        self.cost: dict[str, float] = {}
        """Completions of the units without a result, in the order in which they are given out."""
        self._turns: dict[str, int] = {}
        self._refused: dict[str, set[str]] = {}
        """Workers whose samples of a unit were refused."""
        self.lost = self.doubled = self.again = 0
        """Workers lost; units given to a second worker while a first one has them; units given out anew."""

    def offer(self, units: Mapping[str, float], first: bool = False) -> None:
        """Further units, with their completions. first: before all that nobody has been given yet."""
        self.cost = {**units, **self.cost} if first else {**self.cost, **units}
        self._turns |= dict.fromkeys(units, 0)

    def beat(self, worker: str, now: float, rate: float, admitted: bool = True) -> None:
        """A new heartbeat of a worker, which may be its first. admitted: whether it may have units from then
        on."""
        seen = self.workers.setdefault(worker, SeenWorker(now, admitted=admitted))
        seen.at = now
        seen.rate = rate

    def forgive(self, now: float) -> None:
        """The store was away: nobody could be seen, so nobody is late."""
        for seen in self.workers.values():
            seen.at = now

    def probe(self, worker: str, unit: str) -> None:
        """Gives a unit that is for this worker alone, which has no other."""
        self.workers[worker].queue = [GivenUnit(unit, 1)]

    def leave(self, worker: str) -> None:
        """A worker is gone; its units are free again."""
        seen = self.workers.pop(worker, None)
        if seen is not None:
            self.again += sum(given.unit in self.cost for given in seen.queue)

    def done(self, unit: str) -> None:
        """A unit has its result. A second result changes nothing."""
        self.cost.pop(unit, None)
        self._turns.pop(unit, None)
        self._refused.pop(unit, None)
        for seen in self.workers.values():
            seen.queue = [given for given in seen.queue if given.unit != unit]

    def fail(self, given: GivenUnit, worker: str) -> int:
        """What a worker sent cannot be used; returns how often that has happened to the unit."""
        seen = self.workers.get(worker)
        if seen is not None:
            seen.queue = [other for other in seen.queue if other != given]
        if given.unit not in self.cost:
            return 0
        self.again += 1
        self._refused.setdefault(given.unit, set()).add(worker)
        return len(self._refused[given.unit])

    def tick(self, now: float, unready: Set[str] = frozenset()) -> dict[str, list[GivenUnit]]:
        """Gives units out; returns what every living worker is to sample, in order. unready: units whose
        weights no worker can fetch yet."""
        for name in [name for name, seen in self.workers.items() if now - seen.at > self.lost_s]:
            self.leave(name)
            self.lost += 1
        owned = self._owned()
        for unit in [unit for unit in self.cost if unit not in owned and unit not in unready]:
            name = self._next_free(unit)
            if name is None:
                break
            self._give(unit, name)
            owned[unit] = 1
        for name, seen in sorted(self.workers.items()):
            if seen.admitted and not seen.queue and (unit := self._latest(name, owned)):
                self._give(unit, name)
                owned[unit] += 1
                self.doubled += 1
        return {name: list(seen.queue) for name, seen in self.workers.items()}

    def _owned(self) -> dict[str, int]:
        """By how many each unit is being sampled, of those that are by any."""
        owned: dict[str, int] = {}
        for seen in self.workers.values():
            for given in seen.queue:
                owned[given.unit] = owned.get(given.unit, 0) + 1
        return owned

    def _give(self, unit: str, worker: str) -> None:
        self._turns[unit] += 1
        self.workers[worker].queue.append(GivenUnit(unit, self._turns[unit]))

    def _next_free(self, unit: str) -> str | None:
        """The worker that would end this unit first, among those that take one more; None if all are full."""
        refused = self._refused.get(unit, set())
        admitted = {name: seen for name, seen in self.workers.items() if seen.admitted}
        free = [name for name, seen in admitted.items() if len(seen.queue) < DEPTH]
        others = [name for name in free if name not in refused]
        # a worker whose samples of this unit were refused gets it again only where there is no other
        if not others and any(name not in refused for name in admitted):
            return None
        candidates = others or free
        if not candidates:
            return None
        rates = self._rates()

        def end_s(name: str) -> float:
            queued = sum(self.cost[given.unit] for given in admitted[name].queue)
            return (queued + self.cost[unit]) / rates[name]

        return min(candidates, key=lambda name: (end_s(name), name))

    def _latest(self, worker: str, owned: Mapping[str, int]) -> str | None:
        """The unit that its owner would end last, for an idle worker to sample too."""
        rates = self._rates()
        latest: tuple[float, str] | None = None
        for name, seen in self.workers.items():
            queued = 0.0
            for given in seen.queue if seen.admitted else ():
                queued += self.cost[given.unit]
                refused = worker in self._refused.get(given.unit, set())
                if name == worker or refused or owned[given.unit] >= COPIES:
                    continue
                latest = max(latest or (0.0, ""), (queued / rates[name], given.unit))
        return latest[1] if latest else None

    def _rates(self) -> dict[str, float]:
        """Completions per second of every worker; of one that is new, the median of the others."""
        known = sorted(seen.rate for seen in self.workers.values() if seen.rate > 0)
        usual = known[len(known) // 2] if known else 1.0
        return {name: seen.rate or usual for name, seen in self.workers.items()}
