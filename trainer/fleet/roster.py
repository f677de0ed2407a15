"""Which workers there are, by their heartbeats, and what the head counts of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from trainer.fleet import objects as keys
from trainer.fleet.fleet_records import LOADING, GivenUnit, HeartbeatRecord
from trainer.fleet.objects import Objects
from trainer.fleet.worker_heartbeat import read_heartbeat
from trainer.storage.seal import ForgedObject
from trainer.system.records import MalformedRecord

LIST_S = 10.0
"""Seconds between two looks for workers that are new."""
LOADING_S = 3600.0
"""Longest time for which a worker that builds its engine counts as one that will come."""


@dataclass
class FleetCounts:
    units: int = 0
    late: int = 0
    refused: int = 0
    forged: int = 0
    turned_away: int = 0
    """Workers that were told to end: for their probe, or since their samples were refused."""
    by_worker: dict[str, int] = field(default_factory=dict)
    """Completions of every worker that were accepted."""
    by_device: dict[str, int] = field(default_factory=dict)
    """Completions that were accepted since the last step was logged, by the device that sampled them."""
    worker_s: float = 0.0
    """Seconds that workers have lived, all added up."""
    idle_s: float = 0.0
    """Those of them in which a worker had no unit."""
    counted_at: float = field(default_factory=time.monotonic)

    def count_accepted(self, worker: str, device: str, completions: int) -> None:
        self.units += 1
        self.by_worker[worker] = self.by_worker.get(worker, 0) + completions
        name = device.replace(" ", "-")
        self.by_device[name] = self.by_device.get(name, 0) + completions

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call: completions by device, and the share of the workers' time in which
        they had no unit; 0 without workers."""
        metrics = {f"fleet/sampled_{name}": float(number) for name, number in self.by_device.items()}
        metrics["fleet/idle_share"] = self.idle_s / self.worker_s if self.worker_s else 0.0
        self.by_device = {}
        self.worker_s = self.idle_s = 0.0
        return metrics

    def count_lived(self, busy: Sequence[bool]) -> None:
        """Adds the time since the last call to what workers lived and idled. busy: whether each of them had a
        unit in it."""
        now = time.monotonic()
        passed_s = now - self.counted_at
        self.counted_at = now
        self.worker_s += passed_s * len(busy)
        self.idle_s += passed_s * busy.count(False)


@dataclass
class KnownWorker:
    heartbeat: HeartbeatRecord
    loading_since: float | None = None
    """When the head saw it first build its engine; None once it has one."""
    refused_in_a_row: int = 0
    """Units of it that were refused since one was accepted."""
    mailed: list[GivenUnit] | None = None
    """What its mail in the bucket asks for; None where that must be written again."""


class Roster:
    """The workers of one attempt. Its head's thread alone calls what reads or deletes."""

    def __init__(
        self,
        objects: Objects,
        attempt: str,
        counts: FleetCounts,
        pool: Executor,
        poll_s: float,
        on_malformed: Callable[[str, str], None],
    ) -> None:
        """poll_s: seconds between two looks while nobody is there. on_malformed: is told the worker whose
        heartbeat this code could not have written, and why."""
        self.objects, self.attempt = objects, attempt
        self.counts = counts
        self._pool, self._poll_s = pool, poll_s
        self._on_malformed = on_malformed
        self.workers: dict[str, KnownWorker] = {}
        self.alive_at = time.monotonic()
        """When a worker was last seen that samples, or may soon."""
        self._serials: dict[str, int] = {}
        self._seen_at: dict[str, float] = {}
        """When each worker's newest heartbeat was read first."""
        self._listed: set[str] = set()
        self._listed_at = -LIST_S

    def list_due(self, now: float) -> bool:
        return now - self._listed_at >= (LIST_S if self._listed else self._poll_s)

    def list_all(self, now: float) -> None:
        """Looks for workers that are new. Raises StorageError."""
        names = [key for key, _ in self.objects.storage.list(keys.WORKERS)]
        self._listed = {name.rpartition("/")[2].removesuffix(".json") for name in names}
        self._listed_at = now

    def everyone(self) -> list[str]:
        return sorted(self._listed)

    def read(self, names: Collection[str]) -> dict[str, HeartbeatRecord]:
        """The heartbeats of these workers that are new, read side by side, in the order of the names. Raises
        StorageError."""
        fresh = {}
        for name, heartbeat in zip(names, self._pool.map(self._fetch, names), strict=True):
            if isinstance(heartbeat, Exception):
                self._listed.discard(name)  # until the next listing
                if isinstance(heartbeat, MalformedRecord):
                    self._on_malformed(name, str(heartbeat))
                else:
                    self.counts.forged += 1
            elif heartbeat is not None and self._serials.get(name) != heartbeat.serial:
                self._serials[name] = heartbeat.serial
                self._seen_at[name] = time.monotonic()
                if heartbeat.attempt == self.attempt:
                    fresh[name] = heartbeat
        return fresh

    def _fetch(self, name: str) -> HeartbeatRecord | ForgedObject | MalformedRecord | None:
        try:
            return read_heartbeat(self.objects, name)
        except (ForgedObject, MalformedRecord) as error:
            return error

    def update(self, name: str, heartbeat: HeartbeatRecord) -> None:
        worker = self.workers.setdefault(name, KnownWorker(heartbeat))
        worker.heartbeat = heartbeat

    def note_alive(self, name: str, now: float) -> None:
        """Takes note that a worker lives, which may be asked for samples. One that builds its engine for too
        long does not count."""
        worker = self.workers[name]
        if worker.heartbeat.state != LOADING:
            worker.loading_since = None
        elif worker.loading_since is None:
            worker.loading_since = now
        if worker.loading_since is None or now - worker.loading_since < LOADING_S:
            self.alive_at = now

    def silent_s(self, name: str) -> float:
        """Seconds since a worker's newest heartbeat was read."""
        return time.monotonic() - self._seen_at.get(name, 0.0)
