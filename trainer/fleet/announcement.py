"""What the head of an attempt says of itself in the bucket, and what must be there before it says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

from msgspec import structs

from trainer.checkpoint.attempt import Attempt
from trainer.fleet.fleet_records import HeadRecord
from trainer.fleet.heartbeat import HEARTBEAT_S
from trainer.fleet.objects import Objects, head_key


class HeadAnnouncement:
    """`head/ATTEMPT.json`. Any thread may change it; one thread writes it, when it is new and from time to
    time."""

    def __init__(self, objects: Objects, attempt: Attempt, pool: Executor) -> None:
        self._objects, self._attempt = objects, attempt
        self._pool = pool
        self._lock = threading.Lock()
        self.newest = HeadRecord(attempt=attempt.name)
        self.written: HeadRecord | None = None
        """What lies in the bucket, but for its serial."""
        self._before: dict[str, Any] = {}
        """Objects that are written before the newest record."""
        self._serial = 0
        self._written_at = -HEARTBEAT_S

    def change(self, before: Mapping[str, Any] | None = None, **fields: Any) -> None:
        """Changes fields of the record. before: objects that must be in the bucket by then, by key."""
        with self._lock:
            self._before |= before or {}
            self.newest = structs.replace(self.newest, **fields)

    def turn_away(self, worker: str, why: str) -> None:
        """Tells a worker to end."""
        with self._lock:
            turned_away = self.newest.turned_away | {worker: why}
            self.newest = structs.replace(self.newest, turned_away=turned_away)

    def write_if_due(self) -> None:
        """Writes what is new, and that the head lives. Raises Fenced, StorageError."""
        with self._lock:
            newest, before = self.newest, dict(self._before)
        if newest is self.written and time.monotonic() - self._written_at < HEARTBEAT_S:
            return
        self._attempt.check()
        list(self._pool.map(self._objects.put_record, before.keys(), before.values()))
        self._serial += 1
        record = structs.replace(newest, serial=self._serial)
        self._objects.put_record(head_key(self._attempt.name), record)
        self.written, self._written_at = newest, time.monotonic()
        with self._lock:
            self._before = {key: value for key, value in self._before.items() if key not in before}
