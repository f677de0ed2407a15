"""Which workers there are, by their heartbeats, and what the head counts of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from trainer.fleet import objects as keys
from trainer.fleet.heartbeat import heartbeat_refusal
from trainer.fleet.objects import Objects
from trainer.storage.seal import ForgedObject

LIST_S = 10.0
"""Seconds between two looks for workers that are new."""
FORGET_S = 3600.0
"""Silence after which a worker's heartbeat and mail are deleted; until then they tell how it ended."""


@dataclass
class FleetCounts:
    """What a head counts since its start."""

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

    def accepted(self, worker: str, device: str, completions: int) -> None:
        """A unit of a worker's was accepted."""
        self.units += 1
        self.by_worker[worker] = self.by_worker.get(worker, 0) + completions
        name = device.replace(" ", "-")
        self.by_device[name] = self.by_device.get(name, 0) + completions

    def take_metrics(self) -> dict[str, float]:
        """Metrics of what is counted since the last call: completions by device, and the share of
        the workers' time in which they had no unit; 0 without workers."""
        found = {f"fleet/sampled_{name}": float(number) for name, number in self.by_device.items()}
        found["fleet/idle_share"] = self.idle_s / self.worker_s if self.worker_s else 0.0
        self.by_device = {}
        self.worker_s = self.idle_s = 0.0
        return found

    def lived(self, busy: Sequence[bool]) -> None:
        """Adds the time since the last call to what workers lived and idled. busy: whether each of them had a
        unit in it."""
        now = time.monotonic()
        passed_s = now - self.counted_at
        self.counted_at = now
        self.worker_s += passed_s * len(busy)
        self.idle_s += passed_s * busy.count(False)


class Roster:
    """The workers of one attempt. Its head's thread alone calls what reads or deletes."""

    def __init__(
        self,
        objects: Objects,
        attempt: str,
        counts: FleetCounts,
        pool: ThreadPoolExecutor,
        poll_s: float,
        malformed: Callable[[str, str], None],
    ) -> None:
        """poll_s: seconds between two looks while nobody is there. malformed: is told the worker whose
        heartbeat this code could not have written, and why, as the end of a sentence."""
        self.objects, self.attempt = objects, attempt
        self.counts = counts
        self._pool, self._poll_s = pool, poll_s
        self._malformed = malformed
        self.newest: dict[str, dict[str, Any]] = {}
        """The newest heartbeat of every worker that follows this attempt."""
        self.seen_at: dict[str, float] = {}
        """When each worker's newest heartbeat was read first."""
        self._serials: dict[str, int] = {}
        self._known: set[str] = set()
        """Workers with a heartbeat in the bucket."""
        self._listed = -LIST_S

    def list_due(self, now: float) -> bool:
        """Whether it is time to look for workers that are new."""
        return now - self._listed >= (LIST_S if self._known else self._poll_s)

    def list_all(self, now: float) -> None:
        """Looks for workers that are new. Raises StorageError."""
        names = [key for key, _ in self.objects.storage.list(keys.WORKERS)]
        self._known = {name.rpartition("/")[2].removesuffix(".json") for name in names}
        self._listed = now

    def everyone(self) -> list[str]:
        """All that have a heartbeat in the bucket."""
        return sorted(self._known)

    def read(self, workers: Collection[str]) -> dict[str, dict[str, Any]]:
        """Their heartbeats that are new, read side by side, in the order of the names given. Raises
        StorageError."""
        heard = {}
        for name, found in zip(workers, self._pool.map(self._fetch, workers), strict=True):
            if isinstance(found, ForgedObject):
                self.counts.forged += 1
                self._known.discard(name)  # until the next listing
            elif found is not None and self._is_new(name, found):
                heard[name] = found
        return heard

    def _fetch(self, worker: str) -> Any:
        try:
            return self.objects.get_json(keys.worker_key(worker))
        except ForgedObject as error:
            return error

    def _is_new(self, worker: str, beat: Any) -> bool:
        """Whether the heartbeat is one of this attempt's that was not read before."""
        if why := heartbeat_refusal(beat, worker):
            self._known.discard(worker)
            self._malformed(worker, why)
            return False
        if self._serials.get(worker) == beat["serial"]:
            return False
        self._serials[worker] = beat["serial"]
        self.seen_at[worker] = time.monotonic()
        return beat["attempt"] == self.attempt

    def drop_silent(self, now: float) -> list[str]:
        """Forgets the workers that have been silent for long, with their heartbeats and mail; returns them.
        Raises StorageError."""
        silent = [name for name, since in self.seen_at.items() if now - since > FORGET_S]
        for name in silent:
            self.objects.storage.delete([keys.worker_key(name), keys.mail_key(self.attempt, name)])
            self._known.discard(name)
            self.newest.pop(name, None)
            self._serials.pop(name, None)
            del self.seen_at[name]
        return silent

    def device(self, worker: str) -> str:
        """What its engine is on."""
        return self.newest[worker]["device"]

    def entry(self, worker: str, lives: bool, why: str) -> dict[str, Any]:
        """A worker as display and report tell it. why: it does not live, where it does not."""
        beat = self.newest[worker]
        return {
            "worker": worker,
            "host": beat["host"],
            "device": beat["device"],
            "lives": lives,
            "why": "" if lives else why,
            "state": beat["state"],
            "completions": self.counts.by_worker.get(worker, 0),
            "completions_per_s": beat["rate"] if lives else 0.0,
        }
