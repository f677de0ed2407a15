"""The head's thread: it watches the workers, takes in what they send, and mails out what comes next.

The trainer's own thread offers units and waits for them. So weights may be published, and steps may be
trained, while units of later steps are sampled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.algorithm.traces import Trace
from trainer.checkpoint.attempt import Attempt
from trainer.fleet import objects as keys
from trainer.fleet.admission import Probes
from trainer.fleet.heartbeat import HEARTBEAT_S, LOADING, NOT_READY, SAMPLING
from trainer.fleet.objects import Objects
from trainer.fleet.roster import FleetCounts, Roster
from trainer.fleet.sample_intake import Received, RefusedSamples, SentUnit, read_samples
from trainer.fleet.scheduler import GivenUnit, Scheduler
from trainer.fleet.units import RolloutUnit
from trainer.fleet.verify import NOT_FINITE, AskedUnit
from trainer.system.errors import StorageError, StoreRefused

POLL_S = 1.0
PARALLEL = 32
"""Requests that are made at a time."""
DELETING = 4
"""Objects that are deleted at a time, beside all else."""
LOADING_S = 3600.0
"""Longest time for which a worker that builds its engine counts as one that will come."""
MOST_REFUSALS = 2
"""Workers that may send samples of one unit that are refused; then the run ends."""
MOST_IN_A_ROW = 3
"""Units of one worker that may be refused in a row; then it is told to end."""


class NoWorkers(ConnectionError):
    """There was no worker for `fleet.wait_s`: the trainer ends, and is started again later."""


class UnitRefused(RuntimeError):
    """Two workers sent samples of one unit that cannot be trained on."""


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
        moved: Callable[[], None] = lambda: None,
        poll_s: float = POLL_S,
    ) -> None:
        """moved: called, from the head's thread, when a worker's engine has made progress."""
        self.objects, self.held = objects, held
        self._expected = expected
        self.wait_s, self.poll_s = wait_s, poll_s
        self._say, self._moved_on = say, moved
        self.scheduler = Scheduler(lost_s)
        self.counts = FleetCounts()
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="fleet")
        self._arriving = ThreadPoolExecutor(1, thread_name_prefix="fleet-patches")
        self._deleting = ThreadPoolExecutor(DELETING, thread_name_prefix="fleet-delete")
        self.workers = Roster(objects, held.name, self.counts, self._pool, poll_s, self._malformed)
        self._head: dict[str, Any] = {"attempt": held.name, "state": "running", "why": ""}
        self._head |= {"version": 0, "lineage": "", "anchors": []}
        self._said: dict[str, Any] = {}
        """What was written last of it."""
        self._before: dict[str, Any] = {}
        """Objects that are written before it is said."""
        self._serial = 0
        self._units: dict[str, RolloutUnit] = {}
        self._traces: dict[str, list[Trace]] = {}
        self._taken: set[tuple[str, GivenUnit]] = set()
        """(worker, what it was given) whose samples were read."""
        self._mailed: dict[str, list[GivenUnit]] = {}
        self._loading_since: dict[str, float] = {}
        """When the head saw a worker first that builds its engine."""
        self._probes = Probes(self.scheduler)
        self._refused: dict[str, list[str]] = {}
        """Workers whose samples of a unit were refused, one for each time."""
        self._in_a_row: dict[str, int] = {}
        """Units of a worker that were refused since one was accepted."""
        self._turned_away: dict[str, str] = {}
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._wake = threading.Event()
        """Set where the thread need not wait until its next look."""
        self._written = -HEARTBEAT_S
        self._alive_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="fleet-head", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    # --- for the trainer's thread ---------------------------------------------------------------------------

    def announce(self, before: Mapping[str, Any] | None = None, **about: Any) -> None:
        """Says what is new of the head, such as a version that workers may be asked for; the thread writes
        it. before: objects that must be there by then, as JSON data by key. Raises what ended the thread."""
        with self._changed:
            if self._error is not None:
                raise self._error
            self._before |= before or {}
            self._head = self._head | about
        self._wake.set()

    def publish(
        self, patches: Sequence[str], before: Mapping[str, Any], gone: Sequence[str], **about: Any
    ) -> None:
        """Announces a version once all of its patches are in the bucket, and after the versions before it;
        returns at once. gone: objects that are deleted then. A rank that cannot send one says so itself."""

        def work() -> None:
            try:
                if self.objects.wait_for(patches, self._pool, self._stop):
                    self.held.check()
                    self.announce(before, **about)
                    self.delete(gone)
            except Exception as error:
                self._end(error)

        self._arriving.submit(work)

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects beside all else. One that the store keeps is deleted by the next attempt."""
        for name in names:
            self._deleting.submit(self.objects.storage.delete, [name])

    def offer(self, units: Sequence[RolloutUnit], first: bool = False) -> None:
        """Units to be sampled; they begin at once. first: before those that wait already."""
        with self._changed:
            self._units |= {unit.name: unit for unit in units}
            self.scheduler.offer({unit.name: unit.cost for unit in units}, first)
        self._wake.set()

    def take(self, unit: RolloutUnit, meanwhile: Callable[[], None] = lambda: None) -> list[Trace]:
        """Waits for a unit's samples. meanwhile: called while it waits, at every news. Raises NoWorkers,
        UnitRefused, Fenced, StorageError."""
        waiting = time.monotonic()
        while not self.has([unit]):
            with self._changed:
                if self._error is not None:
                    raise self._error
                silent = time.monotonic() - max(waiting, self._alive_at)
                if not self.scheduler.workers and silent > self.wait_s:
                    raise NoWorkers(
                        f"no rollout worker for {silent:.0f} s (fleet.wait_s): start some with"
                        f" fleet.run={self.objects.seal.run_id}; the run goes on from its checkpoint then"
                    )
                if unit.name not in self._traces:
                    self._changed.wait(1.0)
            meanwhile()
        with self._changed:
            self._units.pop(unit.name)
            return self._traces.pop(unit.name)

    def has(self, units: Sequence[RolloutUnit]) -> bool:
        """Whether the samples of all these units are there."""
        with self._changed:
            return all(unit.name in self._traces for unit in units)

    def probe_with(self, unit: RolloutUnit) -> None:
        """From now on a worker that joins samples this unit, under a name of its own, and nothing else until
        it is admitted. The learner holds the weights of its version."""
        with self._changed:
            self._probes.renew(unit)

    def probing(self) -> set[str]:
        """Workers that have a probe, or are about to get one."""
        with self._changed:
            return self._probes.pending()

    def probed(self) -> list[tuple[str, str, list[Trace]]]:
        """(worker, its device, what it sampled) of the probes that have come in."""
        with self._changed:
            return [(name, self.workers.device(name), traces) for name, traces in self._probes.take()]

    def admit(self, worker: str) -> None:
        """The worker may have units."""
        self._say(f"worker {worker} is admitted")
        with self._changed:
            self._probes.admit(worker)

    def turn_away(self, worker: str, why: str) -> None:
        """The worker is told to end, and why; it gets no units."""
        self._say(f"worker {worker} is turned away: {why}")
        with self._changed:
            self.counts.turned_away += 1
            self._turned_away[worker] = why
            self._head = self._head | {"turned_away": dict(self._turned_away)}
            self._probes.drop(worker)
            self.scheduler.leave(worker)
        self._wake.set()

    def pause(self) -> None:
        """Waits for something new, a second at most."""
        with self._changed:
            self._changed.wait(1.0)

    def close(self, state: str, why: str, gone: Iterable[str] = ()) -> None:
        """Ends the thread and says why this head is silent from now on. gone: objects that are deleted then.
        Raises Fenced, StorageError."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._arriving.shutdown(cancel_futures=True)
        try:
            if self._error is None:
                self._head = self._head | {"state": state, "why": why}
                self._speak()
                self.delete(gone)
        finally:
            self._deleting.shutdown(cancel_futures=self._error is not None)
            self._pool.shutdown()

    def take_metrics(self) -> dict[str, float]:
        """Metrics of what was counted since the last call."""
        with self._changed:
            return self.counts.take_metrics()

    def roster(self) -> list[dict[str, Any]]:
        """Every worker that was seen: what it is, what it did, and whether it lives or why it ended."""
        with self._changed:
            return [self._entry(name, beat) for name, beat in sorted(self.workers.newest.items())]

    def _entry(self, name: str, beat: dict[str, Any]) -> dict[str, Any]:
        silent_s = time.monotonic() - self.workers.seen_at.get(name, 0.0)
        fetches = beat["state"] in NOT_READY and silent_s < self.scheduler.lost_s
        lives = name in self.scheduler.workers or (fetches and not beat["goodbye"])
        silent = f"silent for more than {self.scheduler.lost_s:.0f} s"
        return self.workers.entry(name, lives, self._turned_away.get(name) or beat["goodbye"] or silent)

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        away_since: float | None = None
        served = False
        while True:
            self._wake.wait(self.poll_s)
            self._wake.clear()
            if self._stop.is_set():
                return None
            try:
                self._round()
                served = True
                if away_since is not None:
                    with self._changed:
                        self.scheduler.forgive(time.monotonic())
                    self._say(f"the store is back after {time.monotonic() - away_since:.0f} s")
                    away_since = None
            except (StorageError, StoreRefused) as error:  # Storage has tried it for minutes
                if isinstance(error, StoreRefused) and not served:
                    return self._end(error)
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
        self._speak()
        heard = self.workers.read(self._due(now))
        for worker, beat in heard.items():
            self._see(worker, beat)
        self._take_in(heard)
        for worker, beat in heard.items():
            self._see_off(worker, beat["goodbye"])
        if time.monotonic() - now > HEARTBEAT_S:  # the store was slow, or away: nobody could be seen
            with self._changed:
                self.scheduler.forgive(time.monotonic())
        self._mail()

    def _due(self, now: float) -> Sequence[str]:
        """Workers whose heartbeats are read: those that sample, and from time to time everyone."""
        alive = list(self.scheduler.workers)
        listing = self.workers.list_due(now)
        if alive and not listing:
            return alive
        if listing:
            self.workers.list_all(now)
            for name, beat in self.workers.newest.items():
                if beat["state"] != SAMPLING:  # mail that somebody has overwritten is written again
                    self._mailed.pop(name, None)
        for name in self.workers.drop_silent(now):
            self._forget(name)
        return self.workers.everyone()

    def _speak(self) -> None:
        """Writes what is new of the head, and that it lives."""
        with self._changed:
            head, before = self._head, dict(self._before)
        if head is self._said and time.monotonic() - self._written < HEARTBEAT_S:
            return
        self.held.check()
        list(self._pool.map(self.objects.put_json, before.keys(), before.values()))
        self._serial += 1
        self.objects.put_json(keys.head_key(self.held.name), head | {"serial": self._serial})
        self._said, self._written = head, time.monotonic()
        with self._changed:
            self._before = {key: value for key, value in self._before.items() if key not in before}

    def _malformed(self, worker: str, why: str) -> None:
        """A heartbeat that this code did not write: its worker is told once."""
        if worker not in self._turned_away:
            self.turn_away(worker, f"its heartbeat {why}: its code is another")

    def _see(self, worker: str, beat: dict[str, Any]) -> None:
        before = self.workers.newest.get(worker)
        if before is None:
            self._say(f"worker {worker} joins ({beat['device']} on {beat['host']})")
        elif any(before.get(fact) != beat.get(fact) for fact in ("host", "process", "device")):
            self._say(f"worker {worker} begins anew ({beat['device']} on {beat['host']})")
            self._forget(worker)
        elif beat["pieces"] != before["pieces"]:
            self._moved_on()
        self.workers.newest[worker] = beat
        if worker in self._turned_away:
            return
        with self._changed:
            now = time.monotonic()
            if beat["state"] != LOADING:
                self._loading_since.pop(worker, None)
                self._alive_at = now
            elif now - self._loading_since.setdefault(worker, now) < LOADING_S:
                self._alive_at = now
            if not beat["goodbye"] and beat["state"] not in NOT_READY:
                # the short completions of a probe say nothing of its speed
                rate = beat["rate"] if worker in self.counts.by_worker else 0.0
                self.scheduler.beat(worker, time.monotonic(), rate, self._probes.may_sample(worker))

    def _see_off(self, worker: str, goodbye: str) -> None:
        if goodbye and worker in self.scheduler.workers:
            self._say(f"worker {worker} leaves: {goodbye}")
            with self._changed:
                self.scheduler.leave(worker)

    def _forget(self, worker: str) -> None:
        """The name is another process's from now on, which is not admitted."""
        with self._changed:
            self._probes.forget(worker)
            self._in_a_row.pop(worker, None)
            self.scheduler.leave(worker)

    def _take_in(self, heard: Mapping[str, dict[str, Any]]) -> None:
        """Reads, checks and keeps what workers have sent, and deletes it in the bucket. Requests are made
        side by side; what they bring is looked at in the order of the heartbeats."""
        fresh = []
        for worker, beat in heard.items():
            given = [GivenUnit(unit, turn) for unit, turn in beat["sent"] if worker not in self._turned_away]
            fresh += [self._sent(worker, one) for one in given if (worker, one) not in self._taken]
        for sent, received in read_samples(fresh, self.objects, self._expected, self._pool):
            self._look_at(sent, received)
            # Only now: what the store did not let it read is read with the worker's next heartbeat.
            self._taken.add((sent.worker, sent.given))
            self.delete([sent.key])

    def _sent(self, worker: str, given: GivenUnit) -> SentUnit:
        key = keys.samples_key(self.held.name, given.unit, given.turn, worker)
        probe = self._probes.of(worker, given.unit)
        wanted = given.unit in self.scheduler.cost and self._probes.may_sample(worker)
        unit = probe or (self._units.get(given.unit) if wanted else None)
        return SentUnit(worker, given, key, unit, probe is not None)

    def _look_at(self, sent: SentUnit, received: Received) -> None:
        if sent.worker in self._turned_away:
            return
        with self._changed:
            # somebody else's may have come while this was read
            late = not sent.is_probe and sent.given.unit not in self.scheduler.cost
            if late or sent.unit is None:
                self.counts.late += 1
            elif isinstance(received, list):
                self._keep(sent, sent.unit, received)
            elif not isinstance(received, RefusedSamples):
                self.counts.forged += 1
                self._say(f"{received}: it is sampled again")
                self.scheduler.fail(sent.given, sent.worker)
                self._probes.drop(sent.worker)
        if isinstance(received, RefusedSamples) and sent.is_probe:
            self.turn_away(sent.worker, f"its probe is refused: {received}")
        elif isinstance(received, RefusedSamples) and not late:
            self._refuse(sent.worker, sent.given, str(received))

    def _keep(self, sent: SentUnit, unit: RolloutUnit, traces: list[Trace]) -> None:
        if sent.is_probe:
            self.scheduler.fail(sent.given, sent.worker)  # it has done it
            if self._probes.came_in(sent.worker, unit, traces):
                self._changed.notify_all()
            return
        self._in_a_row.pop(sent.worker, None)
        self.counts.accepted(sent.worker, self.workers.device(sent.worker), len(traces))
        self.scheduler.done(unit.name)
        self._refused.pop(unit.name, None)
        self._traces[unit.name] = traces
        self._changed.notify_all()

    def _refuse(self, worker: str, given: GivenUnit, why: str) -> None:
        self.counts.refused += 1
        key = keys.refused_key(self.held.name, given.unit, given.turn, worker)
        self.objects.put_json(key, {"unit": given.unit, "worker": worker, "why": why})
        self._say(f"unit {given.unit} of worker {worker} is refused: {why}")
        with self._changed:
            in_a_row = self._in_a_row[worker] = self._in_a_row.get(worker, 0) + 1
            again = self.scheduler.fail(given, worker)
            # A broken card says nothing of the unit: elsewhere that is a function of its seeds.
            if again and NOT_FINITE not in why:
                self._refused.setdefault(given.unit, []).append(worker)
            refused = self._refused.get(given.unit, [])
            others = len(self.scheduler.workers) > 1
        if in_a_row == MOST_IN_A_ROW:
            self.turn_away(worker, f"{in_a_row} units of it in a row were refused, the last because {why}")
        if len(set(refused) if others else refused) >= MOST_REFUSALS:
            raise UnitRefused(
                f"unit {given.unit} was sampled and refused {len(refused)} times, the last time because"
                f" {why}: its samples are a function of its seeds, so another worker would send the same"
            )

    def _mail(self) -> None:
        """Tells every worker whose units have changed what to sample."""
        with self._changed:
            self.counts.lived([bool(seen.queue) for seen in self.scheduler.workers.values()])
            announced = self._said.get("version", -1)
            self._probes.give(announced)
            unready = {name for name in self.scheduler.cost if self._units[name].version > announced}
            queues = self.scheduler.tick(time.monotonic(), unready)
            fresh = {name: queue for name, queue in queues.items() if queue != self._mailed.get(name)}
            mail: dict[str, list[dict[str, Any]]] = {}
            for name, queue in fresh.items():
                units = [(self._probes.of(name, one.unit) or self._units[one.unit], one) for one in queue]
                mail[name] = [unit.to_json() | {"turn": one.turn} for unit, one in units]
            self._mailed = {name: queue for name, queue in self._mailed.items() if name in queues}
        if any(mail.values()):
            self.held.check()

        def send(name: str) -> None:
            self.objects.put_json(keys.mail_key(self.held.name, name), mail[name])
            self._mailed[name] = fresh[name]

        list(self._pool.map(send, mail))
