"""What works for a head beside the trainer's own thread: its rounds, with patience for a store that is away;
what it says of itself in the bucket; and requests to the store that are made side by side."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from msgspec import structs

from trainer.checkpoint.attempt import Attempt
from trainer.fleet.fleet_records import HeadRecord
from trainer.fleet.objects import Objects, head_key
from trainer.fleet.worker_heartbeat import HEARTBEAT_S
from trainer.system.errors import StorageError, StoreRefused


class HeadThread:
    def __init__(
        self,
        play_round: Callable[[], None],
        store_is_back: Callable[[], None],
        changed: threading.Condition,
        *,
        poll_s: float,
        wait_s: float,
        say: Callable[[str], None],
    ) -> None:
        """poll_s: seconds between two rounds. wait_s: how long the store may be away. changed: notified when
        the thread ends with an error."""
        self._play_round, self._store_is_back = play_round, store_is_back
        self._changed = changed
        self._poll_s, self._wait_s = poll_s, wait_s
        self._say = say
        self.error: Exception | None = None
        self.stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-head", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread after its round, and waits for that."""
        self.stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def fail(self, error: Exception) -> None:
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def _run(self) -> None:
        away_since: float | None = None
        served = False
        while True:
            self._wake.wait(self._poll_s)
            self._wake.clear()
            if self.stopping.is_set():
                return None
            try:
                self._play_round()
                served = True
                if away_since is not None:
                    self._store_is_back()
                    self._say(f"the store is back after {time.monotonic() - away_since:.0f} s")
                    away_since = None
            except (StorageError, StoreRefused) as error:  # Storage has tried it for minutes
                if isinstance(error, StoreRefused) and not served:
                    return self.fail(error)
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > self._wait_s:
                    return self.fail(error)
                self._say(f"{error}; workers go on with what they have")
            except Exception as error:
                return self.fail(error)


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


ARRIVES_S = 0.2
"""Seconds between two looks for objects that are awaited."""
PARALLEL = 32
DELETING = 4
"""Objects that are deleted at a time, beside all else."""


class StoreRequests:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="fleet")
        self._arriving = ThreadPoolExecutor(1, thread_name_prefix="fleet-patches")
        self._deleting = ThreadPoolExecutor(DELETING, thread_name_prefix="fleet-delete")

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects, and returns at once. One that the store keeps is deleted by the next attempt."""
        for name in names:
            self._deleting.submit(self._objects.storage.delete, [name])

    def when_all_are_there(
        self,
        names: Sequence[str],
        stop: threading.Event,
        then: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Calls `then` once the bucket has all these objects, in the order of these calls; returns at once.
        fail: is called with what waiting or `then` raised."""

        def wait() -> None:
            missing = list(names)
            try:
                while missing:
                    with contextlib.suppress(StorageError, StoreRefused):  # the store is away
                        arrived = list(self.pool.map(self._objects.storage.exists, missing))
                        missing = [
                            name for name, is_there in zip(missing, arrived, strict=True) if not is_there
                        ]
                    if missing and stop.wait(ARRIVES_S):
                        return
                then()
            except Exception as error:
                fail(error)

        self._arriving.submit(wait)

    def stop_waiting(self) -> None:
        """Ends what waits for objects, which `stop` of each has ended."""
        self._arriving.shutdown(cancel_futures=True)

    def close(self, finish_deleting: bool) -> None:
        self._deleting.shutdown(cancel_futures=not finish_deleting)
        self.pool.shutdown()
