"""A worker's marks of life, from a thread: a worker that samples is not silent."""

from __future__ import annotations

import threading
from typing import Any

from trainer.errors import StorageError, StoreRefused
from trainer.fleet.dispatch import BEAT_S
from trainer.fleet.objects import Objects, worker_key
from trainer.fleet.scheduler import FETCHING, LOADING, Given
from trainer.observe import beacon

KEPT_SENT = 256
"""Newest units that a mark names as sent."""


class Beats:
    """Writes `workers/NAME.json`: what the worker is, does, and has sent."""

    def __init__(self, objects: Objects, worker: str, facts: dict[str, Any]) -> None:
        """facts: what does not change, such as host and device."""
        self.objects, self.worker = objects, worker
        self._state: dict[str, Any] = {
            "worker": worker,
            "attempt": "",
            "state": LOADING,
            "version": -1,
            "unit": "",
            "rate": 0.0,
            "completions": 0,
            "sent": [],
            "goodbye": "",
        } | facts
        self._serial = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)

    def start(self) -> None:
        """Begins to write."""
        self._thread.start()

    def say(self, **state: Any) -> None:
        """Writes at once what is new. A store that is away is told, not raised: the next mark says it."""
        with self._lock:
            self._state |= state
            self._write()

    def begin(self, attempt: str) -> None:
        """The first mark, before the engine is there: its trainer sees that somebody comes."""
        self._state["attempt"] = attempt
        self.say()
        self.start()

    def follow(self, attempt: str) -> None:
        """Goes on with an attempt, which knows nothing of what was sent to the one before. The weights are
        fetched first."""
        self.say(attempt=attempt, sent=[], state=FETCHING)

    def sent(self, given: Given, completions: int, rate: float) -> None:
        """A unit's samples are in the bucket."""
        sent = [*self._state["sent"], [given.unit, given.turn]][-KEPT_SENT:]
        total = self._state["completions"] + completions
        self.say(sent=sent, completions=total, rate=rate, unit="", state="idle")

    def goodbye(self, why: str) -> None:
        """The last mark."""
        self._stop.set()
        self.say(goodbye=why)

    def _run(self) -> None:
        while not self._stop.wait(BEAT_S):
            self.say()

    def _write(self) -> None:
        self._serial += 1
        try:
            self.objects.put_json(
                worker_key(self.worker), self._state | {"serial": self._serial, "pieces": beacon.pieces()}
            )
        except (StorageError, StoreRefused) as error:
            print(f"worker: {error}", flush=True)
