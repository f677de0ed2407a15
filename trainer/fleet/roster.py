"""Which workers there are, by their heartbeats, and what the head counts of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from trainer.fleet import objects as keys
from trainer.fleet.heartbeat import heartbeat_refusal
from trainer.fleet.objects import Objects
from trainer.storage.seal import Forged

LIST_S = 10.0
"""Seconds between two looks for workers that are new."""
FORGET_S = 3600.0
"""Silence after which a worker's heartbeat and mail are deleted; until then they tell how it ended."""
OWN = "own"
"""The trainer's own engines, among the devices that sample."""


@dataclass
class Counts:
    """What a head counts since its start."""

    units: int = 0
    own: int = 0
    """Units that the trainer's own engines sampled."""
    late: int = 0
    refused: int = 0
    forged: int = 0
    turned_away: int = 0
    """Workers that were told to end: for their probe, or since their samples were refused or of no use."""
    by_worker: dict[str, int] = field(default_factory=dict)
    """Completions of every worker that were accepted."""
    by_device: dict[str, int] = field(default_factory=dict)
    """Completions that were accepted since the last step was logged, by what sampled them."""
    worker_s: float = 0.0
    """Seconds that workers have lived, all added up."""
    idle_s: float = 0.0
    """Those of them in which a worker had no unit."""
    counted_at: float = field(default_factory=time.monotonic)

    def accepted(self, worker: str, device: str, completions: int) -> None:
        """A unit of a worker's was accepted."""
        self.units += 1
        self.by_worker[worker] = self.by_worker.get(worker, 0) + completions
        self.sampled_on(device, completions)

    def sampled_on(self, device: str, completions: int) -> None:
        """Completions of workers on a device, or of the trainer's own engines, were accepted."""
        name = device.replace(" ", "-")
        self.by_device[name] = self.by_device.get(name, 0) + completions

    def take_by_device(self) -> dict[str, float]:
        """Metrics of `by_device`, which begins anew."""
        found = {f"fleet/sampled_{name}": float(number) for name, number in self.by_device.items()}
        self.by_device = {}
        return found

    def lived(self, busy: Sequence[bool]) -> None:
        """Adds the time since the last call to what workers lived and idled. busy: whether each of them had a
        unit in it."""
        now = time.monotonic()
        passed_s = now - self.counted_at
        self.counted_at = now
        self.worker_s += passed_s * len(busy)
        self.idle_s += passed_s * busy.count(False)

    def take_idle_share(self) -> float:
        """Share of the workers' time since the last call in which they had no unit; 0 without workers."""
        share = self.idle_s / self.worker_s if self.worker_s else 0.0
        self.worker_s = self.idle_s = 0.0
        return share


@dataclass(frozen=True)
class Heard:
    """A heartbeat that was not read before."""

    worker: str
    beat: dict[str, Any]
    """Empty where this code could not have written it."""
    malformed: str = ""
    """Why not, as the end of a sentence."""


class Roster:
    """The workers of one attempt. Its head's thread alone calls what reads or deletes."""

    def __init__(
        self, objects: Objects, attempt: str, counts: Counts, pool: ThreadPoolExecutor, poll_s: float
    ) -> None:
        """poll_s: seconds between two looks while nobody is there."""
        self.objects, self.attempt = objects, attempt
        self.counts = counts
        self._pool, self._poll_s = pool, poll_s
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

    def read(self, workers: Collection[str]) -> list[Heard]:
        """Their heartbeats that are new, read side by side, in the order of the names given. Raises
        StorageError."""
        heard = []
        for name, found in zip(workers, self._pool.map(self._fetch, workers), strict=True):
            if isinstance(found, Forged):
                self.counts.forged += 1
                self._known.discard(name)  # until the next listing
            elif found is not None:
                heard += self._hear(name, found)
        return heard

    def _fetch(self, worker: str) -> Any:
        try:
            return self.objects.get_json(keys.worker_key(worker))
        except Forged as error:
            return error

    def _hear(self, worker: str, beat: Any) -> list[Heard]:
        if why := heartbeat_refusal(beat, worker):
            self._known.discard(worker)
            return [Heard(worker, {}, why)]
        if self._serials.get(worker) == beat["serial"]:
            return []
        self._serials[worker] = beat["serial"]
        self.seen_at[worker] = time.monotonic()
        return [Heard(worker, beat)] if beat["attempt"] == self.attempt else []

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


def roster_entry(beat: dict[str, Any], lives: bool, why: str, completions: int) -> dict[str, Any]:
    """A worker as display and report tell it. why: it does not live. completions: its accepted ones."""
    return {
        "worker": beat["worker"],
        "host": beat["host"],
        "device": beat["device"],
        "lives": lives,
        "why": why,
        "state": beat["state"],
        "completions": completions,
        "completions_per_s": beat["rate"] if lives else 0.0,
    }
