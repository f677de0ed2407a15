"""What a worker sees of its run: the newest attempt, its head, and the units that this worker is given."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint.attempt import LAUNCH_VARIABLE
from trainer.config import ConfigError
from trainer.config.run_store import RunStore
from trainer.fleet import objects as keys
from trainer.fleet.heartbeat import HEARTBEAT_S
from trainer.fleet.objects import Anchor, Objects
from trainer.fleet.scheduler import GivenUnit
from trainer.fleet.units import RolloutUnit
from trainer.storage.attempt_record import AttemptRecord
from trainer.storage.seal import KEY_VARIABLE, ForgedObject, Seal, read_secret
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError, StoreRefused

MOST_FORGED = 3
"""Objects of other keys that are looked at before the first of this worker's own."""
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
    """What there is to do."""

    attempt: str
    version: int
    """The newest version of the weights."""
    lineage: str
    mail: tuple[tuple[RolloutUnit, GivenUnit], ...]
    """In order."""
    anchors: tuple[Anchor, ...]


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
        self._known = False
        """Whether anything was written with this worker's key."""
        self._forged = 0
        self.attempt = ""
        """Newest attempt whose head has spoken; empty before the first."""
        self.over = ""
        """Why the run is over; empty while it is not."""
        self.turned_away = ""
        """Why the head wants no samples of this worker; empty while it does."""
        self._awaited = os.environ.get(LAUNCH_VARIABLE, "")
        """The launch of the run that this worker was started with, until that has begun; else empty. What an
        earlier launch came to says nothing of this one."""
        self._epoch = 0
        self._looked = -math.inf
        self._serial = -1
        self._heard = clock()
        self._starting: tuple[str, float] = ("", 0.0)
        """The newest attempt where its head has not spoken, and when this worker saw it first."""
        self._mark: dict[str, Any] | None = None
        """The newest mark of its launcher."""

    @classmethod
    def of(cls, store: RunStore, run_id: str, worker: str = "") -> RunFollower:
        """That of a run in its bucket. Raises ConfigError without a key."""
        seal = Seal(run_id, read_secret())
        record = AttemptRecord(Storage(store.attempts), seal)
        return cls(Objects(Storage(store.fleet), seal), record, worker)

    def about(self) -> dict[str, Any] | None:
        """What the head of the newest attempt said of the run; None before it has. Call it after
        `newest`."""
        return self._signed(keys.about_key(self.attempt)) if self.attempt else None

    def silent_s(self) -> float:
        """Seconds for which no head has said anything new, nor the launcher of one that starts."""
        return self._clock() - self._heard

    def patience_s(self, idle_s: float) -> float:
        """Seconds of silence after which a worker ends: fleet.idle_s, and more until its launch has begun."""
        return max(idle_s, AWAITED_S) if self._awaited else idle_s

    def doubt(self) -> None:
        """Something that the head named is gone: the next look is for a newer attempt too."""
        self._looked = -math.inf

    def newest(self) -> str:
        """The newest attempt that has a head; looks for one from time to time."""
        if self._clock() - self._looked < NEWER_S and self.attempt:
            return self.attempt
        self._looked = self._clock()
        epoch = self._epoch
        if not epoch:
            newest = self.record.newest()
            epoch = newest.attempt.epoch if newest else 0
            if newest is None and self.record.seal.refused:
                self._doubt_key(f"{min(self.record.seal.refused)} was written with another")
        while epoch and (newer := self.record.next_after(epoch)) is not None:
            epoch = newer["epoch"]
        mine = self.record.read(epoch) if epoch else None
        if self._awaited and self.record.has_begun(self._awaited, epoch):
            self._awaited = ""
            self._heard = self._clock()
        if mine is None or self._awaited:
            return self.attempt
        final = self.record.content("final")
        # `resume` opens a run that was over: its end was that of another launch
        if final is not None and final["launch"] == mine["launch"]:
            self.over = final["why"]
        # an attempt that found no step left to train has a head, which says so, and no more
        if self._signed(keys.about_key(mine["name"])) or self._signed(keys.head_key(mine["name"])):
            self._epoch = epoch
            self._starting = ("", 0.0)
            if self.attempt != mine["name"]:
                self.attempt = mine["name"]
                self._serial = -1
        else:
            self._hear_launcher(epoch, mine["name"])
        return self.attempt

    def _hear_launcher(self, epoch: int, name: str) -> None:
        """Hears the launcher of an attempt whose head has not spoken. A trainer that was started by hand has
        none."""
        if self._starting[0] != name:
            self._starting, self._mark = (name, self._clock()), None
            self._heard = self._clock()
        mark = self.record.mark(epoch)
        if mark != self._mark and self._clock() - self._starting[1] < START_S:
            self._heard = self._clock()
        self._mark = mark

    def look(self) -> SeenRun | None:
        """The head and this worker's mail; None where there is no head yet."""
        attempt = self.newest()
        if not attempt:
            return None
        mailed = self._pool.submit(self._signed, keys.mail_key(attempt, self.worker))
        head = self._signed(keys.head_key(attempt))
        asked = mailed.result() or []
        if head is None or head["attempt"] != attempt:
            return None
        if head["serial"] != self._serial:
            self._serial = head["serial"]
            self._heard = self._clock()
        if head["state"] == "over":
            self.over = head["why"]
        self.turned_away = head.get("turned_away", {}).get(self.worker, "")
        mail = []
        for value in asked:
            turn = value.pop("turn")
            unit = RolloutUnit.read(value)
            mail.append((unit, GivenUnit(unit.name, turn)))
        anchors = tuple(Anchor(**anchor) for anchor in head["anchors"])
        return SeenRun(attempt, head["version"], head["lineage"], tuple(mail), anchors)

    def _signed(self, key: str) -> Any:
        """Signed JSON data; None where there is none, or where a stranger wrote it. Raises ConfigError where
        all that the run has ever said is signed with another key."""
        try:
            found = self.objects.get_json(key)
        except ForgedObject as error:
            self._doubt_key(str(error))
            return None
        self._known = self._known or found is not None
        return found

    def _doubt_key(self, why: str) -> None:
        """Counts an object that was not written with this worker's key."""
        self._forged += 1
        if not self._known and self._forged >= MOST_FORGED:
            raise ConfigError(
                f"nothing of this run was written with this key: {KEY_VARIABLE} is that of another run"
                f" ({why})"
            )


class Lookout:
    """Looks at the run from a thread: while a worker samples, its next unit is found. Only this thread calls
    `Following.look` from `start` on."""

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
        """Begins to look."""
        threading.Thread(target=self._run, name="lookout", daemon=True).start()

    def last(self) -> SeenRun | None:
        """What the newest look has shown; None also while the store is away, which counts as the trainer's
        silence. Raises what ended the thread."""
        with self._changed:
            if self._error is not None:
                raise self._error
            return self._seen

    def newer(self) -> SeenRun | None:
        """The same of the next look that ends."""
        with self._changed:
            looks = self._looks
            self._waited_for = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._looks > looks or self._error is not None)
            self._waited_for = False
        return self.last()

    def stop(self) -> None:
        """Ends the thread after the look that it has begun."""
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
                self._rest()

    def _rest(self) -> None:
        """Waits until the next look is due."""
        looked = time.monotonic()
        while not self._stop:
            pause_s = self._poll_s if self._waited_for else HEARTBEAT_S
            left_s = looked + pause_s - time.monotonic()
            if left_s <= 0:
                return
            self._changed.wait(left_s)
