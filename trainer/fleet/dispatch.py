"""The head's thread: it watches the workers, takes in what they send, and mails out what comes next.

The trainer's own thread offers units and waits for them. So weights may be published, and steps may be
trained, while units of later steps are sampled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from trainer.algorithm.traces import Trace
from trainer.checkpoint.attempt import Attempt
from trainer.errors import StorageError
from trainer.fleet import objects as keys
from trainer.fleet.objects import Forged, Objects
from trainer.fleet.scheduler import Given, Scheduler
from trainer.fleet.units import UNREADABLE, RolloutUnit, unpack
from trainer.fleet.verify import AskedUnit, refusal

BEAT_S = 5.0
"""Seconds between two marks of a head or a worker that has nothing new to say."""
LIST_S = 10.0
"""Seconds between two looks for workers that are new."""
FORGET_S = 3600.0
"""Silence after which a worker's mark and mail are deleted; until then they tell a person how it ended."""
POLL_S = 1.0
PARALLEL = 8
"""Objects that are read at a time."""
MOST_REFUSALS = 2
"""Workers that may send samples of one unit that are refused; then the run ends."""


class NoWorkers(ConnectionError):
    """There was no worker for `fleet.wait_s`: the trainer ends, and is started again later."""


class UnitRefused(RuntimeError):
    """Two workers sent samples of one unit that cannot be trained on."""


@dataclass
class Counts:
    """Since the start of this process."""

    units: int = 0
    late: int = 0
    refused: int = 0
    forged: int = 0
    by_worker: dict[str, int] = field(default_factory=dict)
    """Completions of every worker that were accepted."""
    worker_s: float = 0.0
    """Seconds that workers have lived, all added up."""
    idle_s: float = 0.0
    """Those of them in which a worker had no unit."""


class Dispatcher:
    """One attempt's. May be used by the trainer's thread at any time."""

    def __init__(
        self,
        objects: Objects,
        held: Attempt,
        expected: AskedUnit,
        *,
        lost_s: float,
        wait_s: float,
        say: Callable[[str], None] = print,
        poll_s: float = POLL_S,
    ) -> None:
        self.objects, self.held = objects, held
        self.expected = expected
        self.wait_s, self.poll_s = wait_s, poll_s
        self._say = say
        self.scheduler = Scheduler(lost_s)
        self.counts = Counts()
        self.beats: dict[str, dict[str, Any]] = {}
        """The newest beat of every worker that was seen."""
        self._head: dict[str, Any] = {"attempt": held.name, "state": "running", "why": ""}
        self._serial = 0
        self._units: dict[str, RolloutUnit] = {}
        self._steps: dict[str, int] = {}
        """Step of every unit that was ever offered: samples may come when it is long done."""
        self._traces: dict[str, list[Trace]] = {}
        self._taken: set[tuple[str, Given]] = set()
        """(worker, what it was given) whose samples were read."""
        self._mailed: dict[str, list[Given]] = {}
        self._known: set[str] = set()
        """Workers with a mark in the bucket."""
        self._moved: dict[str, tuple[int, float]] = {}
        """Serial number of each worker's newest mark, and when the head saw that first."""
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._written = self._listed = self._checked = -LIST_S
        self._counted = time.monotonic()
        self._alive_at = time.monotonic()
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="fleet")
        self._thread = threading.Thread(target=self._run, name="fleet-head", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    # --- for the trainer's thread ---------------------------------------------------------------------------

    def announce(self, **about: Any) -> None:
        """Says what is new of the head, such as a version that workers may be asked for. Raises Fenced."""
        self.held.check()
        with self._changed:
            self._head = self._head | about
            self._write_head()

    def offer(self, units: Sequence[RolloutUnit], first: bool = False) -> None:
        """Units to be sampled; they begin at once. first: before those that wait already."""
        with self._changed:
            self._units |= {unit.name: unit for unit in units}
            self._steps |= {unit.name: unit.step for unit in units}
            self.scheduler.offer({unit.name: unit.cost for unit in units}, first)

    def take(self, unit: RolloutUnit) -> list[Trace]:
        """Waits for a unit's samples. Raises NoWorkers, UnitRefused, Fenced, StorageError."""
        waiting = time.monotonic()
        with self._changed:
            while unit.name not in self._traces:
                if self._error is not None:
                    raise self._error
                silent = time.monotonic() - max(waiting, self._alive_at)
                if not self.scheduler.workers and silent > self.wait_s:
                    raise NoWorkers(
                        f"no rollout worker for {silent:.0f} s (fleet.wait_s): start some with fleet.run="
                        f"{self.objects.run_id}; the run goes on from its checkpoint when it is started again"
                    )
                self._changed.wait(1.0)
            self._units.pop(unit.name)
            return self._traces.pop(unit.name)

    def has(self, units: Sequence[RolloutUnit]) -> bool:
        """Whether the samples of all these units are there."""
        with self._changed:
            return all(unit.name in self._traces for unit in units)

    def close(self, state: str, why: str) -> None:
        """Ends the thread and says why this head is silent from now on."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown()
        if self._error is None:
            self.announce(state=state, why=why)

    def idle_share(self) -> float:
        """Share of the workers' time since the last call in which they had no unit; 0 without workers."""
        with self._changed:
            share = self.counts.idle_s / self.counts.worker_s if self.counts.worker_s else 0.0
            self.counts.worker_s = self.counts.idle_s = 0.0
            return share

    def roster(self) -> list[dict[str, Any]]:
        """Every worker that was seen: what it is, what it did, and whether it lives or why it ended."""
        with self._changed:
            return [self._worker(name, beat) for name, beat in sorted(self.beats.items())]

    def _worker(self, name: str, beat: dict[str, Any]) -> dict[str, Any]:
        lives = name in self.scheduler.workers
        why = "" if lives else beat["goodbye"] or f"silent for more than {self.scheduler.lost_s:.0f} s"
        return {
            "worker": name,
            "host": beat["host"],
            "device": beat["device"],
            "lives": lives,
            "why": why,
            "state": beat.get("state", ""),
            "completions": self.counts.by_worker.get(name, 0),
            "completions_per_s": beat["rate"] if lives else 0.0,
        }

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        away_since: float | None = None
        while not self._stop.wait(self.poll_s):
            try:
                self._round()
                if away_since is not None:
                    with self._changed:
                        self.scheduler.forgive(time.monotonic())
                    self._say(f"the store is back after {time.monotonic() - away_since:.0f} s")
                    away_since = None
            except StorageError as error:  # Storage has tried it for minutes
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > self.wait_s:
                    return self._end(error)
                self._say(f"{error}; workers go on with what they have")
            except Exception as error:
                return self._end(error)

    def _end(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _round(self) -> None:
        now = time.monotonic()
        if now - self._checked >= BEAT_S:
            self.held.check()
            self._checked = now
        if now - self._written >= BEAT_S:
            with self._changed:
                self._write_head()
        read = list(self.scheduler.workers)
        if not read or now - self._listed >= LIST_S:
            read = self._list_workers(now)
        for name, beat in zip(read, self._pool.map(self._beat, read), strict=True):
            if beat is not None:
                self._see(name, beat)
        if time.monotonic() - now > BEAT_S:  # the store was slow, or away for a while: nobody could be seen
            with self._changed:
                self.scheduler.forgive(time.monotonic())
        self._mail()

    def _list_workers(self, now: float) -> list[str]:
        """Everyone with a mark. Deletes the marks and the mail of those that have been silent for long."""
        if now - self._listed >= (LIST_S if self._known else self.poll_s):
            names = [key for key, _ in self.objects.storage.list(keys.WORKERS)]
            self._known = {name.rpartition("/")[2].removesuffix(".json") for name in names}
            self._listed = now
            self._mailed.clear()  # mail that somebody has overwritten is written again
        for name in [name for name, (_, since) in self._moved.items() if now - since > FORGET_S]:
            self.objects.storage.delete([keys.worker_key(name), keys.mail_key(self.held.name, name)])
            self._known.discard(name)
            self.beats.pop(name, None)
            del self._moved[name]
        return sorted(self._known)

    def _write_head(self) -> None:
        self._serial += 1
        self.objects.put_json(keys.head_key(self.held.name), self._head | {"serial": self._serial})
        self._written = time.monotonic()

    def _beat(self, worker: str) -> dict[str, Any] | None:
        """A worker's newest beat, if it is new and follows this attempt."""
        try:
            beat = self.objects.get_json(keys.worker_key(worker))
        except Forged:
            self.counts.forged += 1
            self._known.discard(worker)  # until the next listing
            return None
        if beat is None or self._moved.get(worker, (-1, 0.0))[0] == beat["serial"]:
            return None
        self._moved[worker] = (beat["serial"], time.monotonic())
        return beat if beat["attempt"] == self.held.name else None

    def _see(self, worker: str, beat: dict[str, Any]) -> None:
        if worker not in self.beats:
            self._say(f"worker {worker} joins ({beat['device']} on {beat['host']})")
        self.beats[worker] = beat
        with self._changed:
            self._alive_at = time.monotonic()
            if not beat["goodbye"]:
                self.scheduler.beat(worker, time.monotonic(), beat["rate"])
        for unit, turn in beat["sent"]:
            given = Given(unit, turn)
            if (worker, given) not in self._taken:
                self._take_in(worker, given)
                # Only now: what the store did not let it read is read with the worker's next beat.
                self._taken.add((worker, given))
        if beat["goodbye"] and worker in self.scheduler.workers:
            self._say(f"worker {worker} leaves: {beat['goodbye']}")
            with self._changed:
                self.scheduler.leave(worker)

    def _take_in(self, worker: str, given: Given) -> None:
        """Reads, checks and keeps what a worker has sent, and deletes it in the bucket."""
        unit = self._units.get(given.unit)
        step = self._steps.get(given.unit, 0)
        key = keys.samples_key(self.held.name, step, given.unit, given.turn, worker)
        if unit is None or given.unit not in self.scheduler.cost:
            self.counts.late += 1
        else:
            self._read(worker, given, unit, key)
        self._pool.submit(self.objects.storage.delete, [key])

    def _read(self, worker: str, given: Given, unit: RolloutUnit, key: str) -> None:
        try:
            sampled = unpack(self.objects.get(key))
            why = refusal(unit, given.turn, worker, sampled, self.expected)
        except (Forged, FileNotFoundError) as error:
            self.counts.forged += 1
            with self._changed:
                self.scheduler.fail(given, worker)
            self._say(f"{error}: it is sampled again")
            return
        except UNREADABLE as error:
            why = f"it cannot be read: {error}"
        if why:
            self._refuse(worker, given, why)
            return
        with self._changed:
            self.scheduler.done(given.unit)
            self._traces[given.unit] = sampled.traces
            self.counts.units += 1
            completions = self.counts.by_worker.get(worker, 0) + len(sampled.traces)
            self.counts.by_worker[worker] = completions
            self._changed.notify_all()

    def _refuse(self, worker: str, given: Given, why: str) -> None:
        self.counts.refused += 1
        key = keys.refused_key(self.held.name, given.unit, given.turn, worker)
        self.objects.put_json(key, {"unit": given.unit, "worker": worker, "why": why})
        self._say(f"unit {given.unit} of worker {worker} is refused: {why}")
        with self._changed:
            times = self.scheduler.fail(given, worker)
        if times >= MOST_REFUSALS or (times and len(self.scheduler.workers) == 1 and given.turn > 1):
            raise UnitRefused(
                f"unit {given.unit} was sampled {given.turn} times and refused, the last time because {why}:"
                " its samples are a function of its seeds, so another worker would send the same"
            )

    def _count_idle(self) -> None:
        """Adds the time since the last round to what workers lived and idled, by what they had in it."""
        now = time.monotonic()
        passed_s = now - self._counted
        self._counted = now
        for seen in self.scheduler.workers.values():
            self.counts.worker_s += passed_s
            if not seen.queue:
                self.counts.idle_s += passed_s

    def _mail(self) -> None:
        """Tells every worker whose units have changed what to sample."""
        with self._changed:
            self._count_idle()
            queues = self.scheduler.tick(time.monotonic())
            fresh = {name: queue for name, queue in queues.items() if queue != self._mailed.get(name)}
            mail: dict[str, list[dict[str, Any]]] = {}
            for name, queue in fresh.items():
                mail[name] = [self._units[one.unit].to_json() | {"turn": one.turn} for one in queue]
            self._mailed = queues
        if any(mail.values()):
            self.held.check()
        for name, units in mail.items():
            self.objects.put_json(keys.mail_key(self.held.name, name), units)
