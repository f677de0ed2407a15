"""A worker's heartbeat in the bucket: how it is written, and how it is read."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from msgspec import structs

from trainer.fleet.fleet_records import FETCHING, LOADING, GivenUnit, HeartbeatRecord
from trainer.fleet.objects import Objects, worker_key
from trainer.observe import beacon
from trainer.system.errors import StorageError, StoreRefused
from trainer.system.records import MalformedRecord

HEARTBEAT_S = 5.0
"""Seconds between two heartbeats of a head or a worker that has nothing new to say."""
KEPT_SENT = 256
"""Newest units that a heartbeat names as sent."""


class WorkerHeartbeat:
    """Writes `workers/NAME.json` from a thread, so that a worker that samples is not silent."""

    def __init__(self, objects: Objects, worker: str, device: str = "") -> None:
        """device: what its engine is on, where that is known."""
        self.objects, self.worker = objects, worker
        self._newest = HeartbeatRecord(
            worker=worker,
            attempt="",
            state=LOADING,
            host=socket.gethostname(),
            device=device,
            goodbye="",
            process=os.getpid(),
            serial=0,
            pieces=0,
            rate=0.0,
            sent=(),
        )
        self._changing, self._writing = threading.Lock(), threading.Lock()
        self._news, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def begin(self, attempt: str, device: str) -> None:
        """Writes the first, before the engine is there: its trainer sees that somebody comes. A thread goes
        on."""
        self.write(attempt=attempt, device=device)
        self._thread.start()

    def note(self, **fields: Any) -> None:
        """Changes fields, which the thread writes next: nobody waits for the store."""
        with self._changing:
            before = self._newest
            self._newest = structs.replace(before, **fields)
        if self._newest != before:
            self._news.set()

    def write(self, **fields: Any) -> None:
        """Changes fields, and writes at once. An error of the store is printed, not raised: the next one
        holds the same."""
        with self._writing:
            with self._changing:
                serial, pieces = self._newest.serial + 1, beacon.pieces_done()
                self._newest = structs.replace(self._newest, **fields, serial=serial, pieces=pieces)
                newest = self._newest
            try:
                self.objects.put_record(worker_key(self.worker), newest)
            except (StorageError, StoreRefused) as error:
                print(f"worker: {error}", flush=True)

    def follow(self, attempt: str) -> None:
        """Goes on with an attempt, which knows nothing of what was sent to the one before. The weights are
        fetched first."""
        self.write(attempt=attempt, sent=(), state=FETCHING)

    def add_sent(self, attempt: str, given: GivenUnit, rate: float) -> None:
        """Names a unit whose samples are in the bucket, unless another attempt asked for it."""
        if self._newest.attempt == attempt:
            self.write(sent=(*self._newest.sent, given)[-KEPT_SENT:], rate=rate)

    def goodbye(self, why: str) -> None:
        """Writes the last one, where there was a first."""
        self._stop.set()
        self._news.set()
        if self._newest.serial:
            self.write(goodbye=why)

    def _run(self) -> None:
        while True:
            self._news.wait(HEARTBEAT_S)
            self._news.clear()
            if self._stop.is_set():
                return
            self.write()


def read_heartbeat(objects: Objects, worker: str) -> HeartbeatRecord | None:
    """A worker's heartbeat; None where there is none. Raises Forged, MalformedRecord, StorageError."""
    heartbeat = objects.get_record(worker_key(worker), HeartbeatRecord)
    if heartbeat is not None and heartbeat.worker != worker:
        raise MalformedRecord(f"{worker_key(worker)} is the heartbeat of {heartbeat.worker}")
    return heartbeat
