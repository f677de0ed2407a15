"""A worker's heartbeat in the bucket: how it is written, and how the head checks what it reads there."""

from __future__ import annotations

import math
import os
import socket
import threading
from typing import Any

from trainer.fleet.objects import Objects, worker_key
from trainer.fleet.scheduler import GivenUnit
from trainer.observe import beacon
from trainer.system.errors import StorageError, StoreRefused

LOADING = "loading"
"""State of a worker that builds its engine."""
FETCHING = "fetching"
"""State of a worker that has an engine and does not have the weights yet: it can sample nothing."""
NOT_READY = (LOADING, FETCHING)
IDLE, SAMPLING = "idle", "sampling"
HEARTBEAT_S = 5.0
"""Seconds between two heartbeats of a head or a worker that has nothing new to say."""
KEPT_SENT = 256
"""Newest units that a heartbeat names as sent."""
EMPTY: dict[str, Any] = {
    "worker": "",
    "attempt": "",
    "state": LOADING,
    "host": "",
    "device": "",
    "goodbye": "",
    "process": 0,
    "serial": 0,
    "pieces": 0,
    "rate": 0.0,
    "sent": [],
}
"""A heartbeat, by the types of whose fields the head knows one."""


class WorkerHeartbeat:
    """Writes `workers/NAME.json`: what the worker is, does, and has sent. From a thread, so that a worker
    that samples is not silent."""

    def __init__(self, objects: Objects, worker: str, device: str = "") -> None:
        """device: what its engine is on, where that is known."""
        self.objects, self.worker = objects, worker
        self._state: dict[str, Any] = EMPTY | {
            "worker": worker,
            "host": socket.gethostname(),
            "process": os.getpid(),
        }
        self._state["device"] = device
        self._serial = 0
        self._changing, self._writing = threading.Lock(), threading.Lock()
        self._news, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def begin(self, attempt: str, device: str) -> None:
        """Writes the first, before the engine is there: its trainer sees that somebody comes. A thread goes
        on."""
        self.say(attempt=attempt, device=device)
        self._thread.start()

    def note(self, **state: Any) -> None:
        """What is new, which the thread writes next: nobody waits for the store."""
        with self._changing:
            is_news = any(self._state[name] != value for name, value in state.items())
            self._state |= state
        if is_news:
            self._news.set()

    def say(self, **state: Any) -> None:
        """Writes at once what is new. A store that is away is told, not raised: the next heartbeat says
        it."""
        with self._writing:
            with self._changing:
                self._state |= state
                self._serial += 1
                beat = self._state | {"serial": self._serial, "pieces": beacon.pieces_done()}
            try:
                self.objects.put_json(worker_key(self.worker), beat)
            except (StorageError, StoreRefused) as error:
                print(f"worker: {error}", flush=True)

    def follow(self, attempt: str) -> None:
        """Goes on with an attempt, which knows nothing of what was sent to the one before. The weights are
        fetched first."""
        self.say(attempt=attempt, sent=[], state=FETCHING)

    def sent(self, attempt: str, given: GivenUnit, rate: float) -> None:
        """A unit's samples are in the bucket. Says nothing to another attempt than the one that asked."""
        if self._state["attempt"] == attempt:
            sent = [*self._state["sent"], [given.unit, given.turn]]
            self.say(sent=sent[-KEPT_SENT:], rate=rate)

    def goodbye(self, why: str) -> None:
        """The last one, where there was a first."""
        self._stop.set()
        self._news.set()
        if self._serial:
            self.say(goodbye=why)

    def _run(self) -> None:
        while True:
            self._news.wait(HEARTBEAT_S)
            self._news.clear()
            if self._stop.is_set():
                return
            self.say()


def heartbeat_refusal(beat: Any, worker: str) -> str:
    """What is wrong with a heartbeat, as the end of a sentence; empty where the head can read it."""
    if not isinstance(beat, dict):
        return f"is a {type(beat).__name__}"
    for name, empty in EMPTY.items():
        value, kind = beat.get(name), type(empty)
        kinds = (int, float) if kind is float else kind
        if not isinstance(value, kinds) or isinstance(value, bool):
            return f"has no {name} of type {kind.__name__}"
    if beat["worker"] != worker:
        return f"is that of {beat['worker']}"
    if not (math.isfinite(beat["rate"]) and beat["rate"] >= 0):
        return f"has a rate of {beat['rate']}"
    for sent in beat["sent"]:
        pair = isinstance(sent, list) and len(sent) == 2
        if not (pair and isinstance(sent[0], str) and isinstance(sent[1], int)):
            return f"names {sent!r} as a unit that was sent"
    return ""
