"""What a worker sees of its run: the newest attempt, its head, and the units that this worker is given."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trainer.checkpoint.attempt import LAUNCH_VARIABLE
from trainer.config import ConfigError
from trainer.config.run_store import RunStore
from trainer.fleet import objects as keys
from trainer.fleet.fleet_records import AboutRun, Anchor, HeadRecord, Mail, MailedUnit
from trainer.fleet.objects import Objects
from trainer.fleet.worker_heartbeat import HEARTBEAT_S
from trainer.storage.attempt_record import AttemptRecord, BeatRecord
from trainer.storage.seal import KEY_VARIABLE, ForgedObject, Seal, read_secret
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError, StoreRefused
from trainer.system.records import MalformedRecord, Record

MOST_FORGED = 3
"""Objects of other keys that are read before the first of this worker's own."""
NEWER_S = 15.0
"""Seconds between two looks for a newer attempt."""
AWAITED_S = 3600.0
"""Seconds that a worker waits at least for the launch of the run that it was started with: that may still be
in its platform's queue."""
START_S = 3600.0
"""Seconds for which the marks of an attempt's launcher count as word of its trainer, before the head of that
speaks: a large model takes long to fetch and to load."""


@dataclass(frozen=True)
class SeenRun:
    attempt: str
    version: int
    lineage: str
    mail: tuple[MailedUnit, ...]
    anchors: tuple[Anchor, ...]


@dataclass
class StartingAttempt:
    """The newest attempt, whose head has not spoken."""

    name: str
    since: float
    """When this worker saw it first."""
    mark: BeatRecord | None = None


class RunFollower:
    """A worker's view of one run. Raises StorageError."""

    def __init__(
        self,
        objects: Objects,
        record: AttemptRecord,
        worker: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.objects, self.record = objects, record
        self.worker = worker
        self._clock = clock
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mail")
        self._refused: int | None = 0
        """Objects of the run that were signed with another key; None once one was signed with this
        worker's."""
        self.attempt = ""
        """Newest attempt whose head has spoken; empty before the first."""
        self.over = ""
        """Why the run is over; empty while it is not."""
        self.turned_away = ""
        """Why the head wants no samples of this worker; empty while it does."""
        self._awaited_launch = os.environ.get(LAUNCH_VARIABLE, "")
        """The launch of the run that this worker was started with, until that has begun; else empty. What an
        earlier launch came to says nothing of this one."""
        self._epoch = 0
        self._looked_at = -math.inf
        self._head_serial = -1
        self._heard_at = clock()
        self._starting = StartingAttempt("", 0.0)

    @classmethod
    def of(cls, store: RunStore, run_id: str, worker: str = "") -> RunFollower:
        """Follows a run in its bucket. Raises ConfigError without a key."""
        seal = Seal(run_id, read_secret())
        record = AttemptRecord(Storage(store.attempts), seal)
        return cls(Objects(Storage(store.fleet), seal), record, worker)

    def about(self) -> AboutRun | None:
        """What the head of the newest attempt said of the run; None before it has. Call it after `newest`."""
        return self._signed(keys.about_key(self.attempt), AboutRun) if self.attempt else None

    def silent_s(self) -> float:
        """Seconds for which no head has said anything new, nor the launcher of one that starts."""
        return self._clock() - self._heard_at

    def patience_s(self, idle_s: float) -> float:
        """Seconds of silence after which a worker ends: fleet.idle_s, and more until its launch has begun."""
        return max(idle_s, AWAITED_S) if self._awaited_launch else idle_s

    def look_for_newer(self) -> None:
        """Lets the next look be for a newer attempt, too: something that the head named is gone."""
        self._looked_at = -math.inf

    def newest(self) -> str:
        """The newest attempt that has a head; looks for one from time to time."""
        if self._clock() - self._looked_at < NEWER_S and self.attempt:
            return self.attempt
        self._looked_at = self._clock()
        epoch = self._newest_epoch()
        record = self.record.read(epoch) if epoch else None
        if self._awaited_launch and self.record.has_begun(self._awaited_launch, epoch):
            self._awaited_launch = ""
            self._heard_at = self._clock()
        if record is None or self._awaited_launch:
            return self.attempt
        # `resume` opens a run that was over: its end was that of another launch
        final = self.record.final()
        if final is not None and final.launch == record.launch:
            self.over = final.why
        name = record.name
        # an attempt that found no step left to train has a head, which says so, and no more
        about = self._signed(keys.about_key(name), AboutRun)
        if about is None and self._signed(keys.head_key(name), HeadRecord) is None:
            self._hear_launcher(epoch, name)
            return self.attempt
        self._epoch = epoch
        self._starting = StartingAttempt("", 0.0)
        if self.attempt != name:
            self.attempt = name
            self._head_serial = -1
        return self.attempt

    def _newest_epoch(self) -> int:
        epoch = self._epoch
        if not epoch:
            newest = self.record.newest()
            epoch = newest.attempt.epoch if newest else 0
            if newest is not None:
                self._refused = None  # the record is signed
            elif self.record.seal.refused:
                self._count_refused(f"{min(self.record.seal.refused)} was written with another")
        while epoch and (newer := self.record.next_after(epoch)) is not None:
            epoch = newer.epoch
        return epoch

    def _count_refused(self, why: str) -> None:
        """Raises ConfigError where nothing of the run was signed with this worker's key."""
        if self._refused is None:
            return
        self._refused += 1
        if self._refused >= MOST_FORGED:
            raise ConfigError(
                f"nothing of this run was written with this key: {KEY_VARIABLE} is that of another run"
                f" ({why})"
            )

    def _hear_launcher(self, epoch: int, name: str) -> None:
        """Hears the launcher of an attempt whose head has not spoken. A trainer that was started by hand has
        none."""
        if self._starting.name != name:
            self._starting = StartingAttempt(name, self._clock())
            self._heard_at = self._clock()
        mark = self.record.get(f"{epoch:08d}.beat", BeatRecord)
        if mark != self._starting.mark and self._clock() - self._starting.since < START_S:
            self._heard_at = self._clock()
        self._starting.mark = mark

    def look(self) -> SeenRun | None:
        """The head and this worker's mail; None where there is no head yet."""
        attempt = self.newest()
        if not attempt:
            return None
        mail = self._pool.submit(lambda: self._signed(keys.mail_key(attempt, self.worker), Mail))
        head = self._signed(keys.head_key(attempt), HeadRecord)
        mailed = mail.result()
        if head is None or head.attempt != attempt:
            return None
        if head.serial != self._head_serial:
            self._head_serial = head.serial
            self._heard_at = self._clock()
        if head.state == "over":
            self.over = head.why
        self.turned_away = head.turned_away.get(self.worker, "")
        return SeenRun(attempt, head.version, head.lineage, mailed.units if mailed else (), head.anchors)

    def _signed(self, key: str, kind: type[Record]) -> Record | None:
        """A signed record; None where there is none, or where a stranger or other code wrote it. Raises
        ConfigError where all that the run has ever said is signed with another key."""
        try:
            record = self.objects.get_record(key, kind)
        except MalformedRecord as error:
            print(f"worker {self.worker}: {error}: it is passed over", flush=True)
            record = None
        except ForgedObject as error:
            self._count_refused(str(error))
            return None
        if record is not None:
            self._refused = None
        return record


class Lookout:
    """Looks at the run from a thread: while a worker samples, its next unit is found. Only this thread calls
    `RunFollower.look` from `start` on."""

    def __init__(self, following: RunFollower, worker: str, poll_s: float) -> None:
        """poll_s: seconds between two looks while the worker waits for one."""
        self.following, self.worker = following, worker
        self._poll_s = poll_s
        self._seen: SeenRun | None = None
        self._looks = 0
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._waited_for = self._stop = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="lookout", daemon=True).start()

    def last(self) -> SeenRun | None:
        """What the newest look has shown; None also while the store is away, which counts as the trainer's
        silence. Raises what ended the thread."""
        with self._changed:
            if self._error is not None:
                raise self._error
            return self._seen

    def newer(self) -> SeenRun | None:
        """Waits for the next look to end; returns and raises as `last`."""
        with self._changed:
            looks = self._looks
            self._waited_for = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._looks > looks or self._error is not None)
            self._waited_for = False
        return self.last()

    def stop(self) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._stop:
            seen = None
            try:
                seen = self.following.look()
            except (StorageError, StoreRefused) as error:
                print(f"worker {self.worker}: {error}", flush=True)
            except Exception as error:
                self._error = error
            with self._changed:
                self._seen = seen
                self._looks += 1
                self._changed.notify_all()
                if self._error is not None:
                    return
                self._pause()

    def _pause(self) -> None:
        looked = time.monotonic()
        while not self._stop:
            pause_s = self._poll_s if self._waited_for else HEARTBEAT_S
            left_s = looked + pause_s - time.monotonic()
            if left_s <= 0:
                return
            self._changed.wait(left_s)
