"""The head of an attempt: it watches the workers, takes in what they send, and mails out what comes next.

The trainer's own thread adds units and waits for them. So weights may be published, and steps may be trained,
while units of later steps are sampled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trainer.algorithm.traces import Trace
from trainer.checkpoint.attempt import Attempt
from trainer.fleet import objects as keys
from trainer.fleet.fleet_records import (
    NOT_READY,
    SAMPLING,
    GivenUnit,
    HeartbeatRecord,
    Mail,
    MailedUnit,
    RefusedUnit,
    RolloutUnit,
)
from trainer.fleet.head_thread import HeadAnnouncement, HeadThread, StoreRequests
from trainer.fleet.objects import Objects
from trainer.fleet.roster import FleetCounts, Roster
from trainer.fleet.sample_intake import (
    NOT_FINITE,
    AskedUnit,
    Received,
    RefusedSamples,
    SampleIntake,
    SentUnit,
)
from trainer.fleet.scheduler import Probes, Scheduler
from trainer.fleet.worker_heartbeat import HEARTBEAT_S


class UnitResults:
    """Every unit from when it is added until its samples are taken."""

    def __init__(self) -> None:
        self.units: dict[str, RolloutUnit] = {}
        self.samples: dict[str, list[Trace]] = {}
        self.refusals: dict[str, list[str]] = {}
        """Workers whose samples of a unit were refused, one for each time."""

    def keep(self, unit: str, traces: list[Trace]) -> None:
        self.refusals.pop(unit, None)
        self.samples[unit] = traces

    def count_refusal(self, unit: str, worker: str) -> None:
        self.refusals.setdefault(unit, []).append(worker)

    def take(self, unit: str) -> list[Trace]:
        self.units.pop(unit)
        return self.samples.pop(unit)


POLL_S = 1.0
MOST_REFUSALS = 2
"""Workers that may send samples of one unit that are refused; then the run ends."""
MOST_IN_A_ROW = 3
"""Units of one worker that may be refused in a row; then it is told to end."""


class NoWorkers(ConnectionError):
    """There was no worker for `fleet.wait_s`: the trainer ends, and is started again later."""


class UnitRefused(RuntimeError):
    """Two workers sent samples of one unit that cannot be trained on."""


class Dispatcher:
    """One attempt's head. May be used by the trainer's thread at any time."""

    def __init__(
        self,
        objects: Objects,
        attempt: Attempt,
        expected: AskedUnit,
        *,
        lost_s: float,
        wait_s: float,
        say: Callable[[str], None] = print,
        engine_moved: Callable[[], None] = lambda: None,
        poll_s: float = POLL_S,
    ) -> None:
        """engine_moved: called, from the head's thread, when a worker's engine has made progress."""
        self.objects, self.attempt = objects, attempt
        self.wait_s = wait_s
        self._say, self._engine_moved = say, engine_moved
        self._changed = threading.Condition()
        """Held by whoever reads or changes scheduler, results, probes, counts or roster."""
        self.scheduler = Scheduler(lost_s)
        self.counts = FleetCounts()
        self._requests = StoreRequests(objects)
        pool = self._requests.pool
        self.roster = Roster(objects, attempt.name, self.counts, pool, poll_s, self._refuse_heartbeat)
        self._announcement = HeadAnnouncement(objects, attempt, pool)
        self._results = UnitResults()
        self._probes = Probes(self.scheduler)
        self._intake = SampleIntake(objects, expected, pool)
        self._thread = HeadThread(
            self._play_round, self._restart_clocks, self._changed, poll_s=poll_s, wait_s=wait_s, say=say
        )

    def start(self) -> None:
        self._thread.start()

    # --- for the trainer's thread ---------------------------------------------------------------------------

    def announce(self, before: Mapping[str, Any] | None = None, **fields: Any) -> None:
        """Says what is new of the head, such as a version that workers may be asked for; the thread writes
        it. before: objects that must be there by then, by key. Raises what ended the thread."""
        self._thread.check()
        self._announcement.change(before, **fields)
        self._thread.wake()

    def publish(
        self, patches: Sequence[str], before: Mapping[str, Any], outdated: Sequence[str], **fields: Any
    ) -> None:
        """Announces a version once all of its patches are in the bucket, and after the versions before it;
        returns at once. outdated: objects that are deleted then. A rank that cannot send one says so
        itself."""

        def announce() -> None:
            self.attempt.check()
            self.announce(before, **fields)
            self.delete(outdated)

        self._requests.when_all_are_there(patches, self._thread.stopping, announce, self._thread.fail)

    def delete(self, names: Iterable[str]) -> None:
        self._requests.delete(names)

    def add_units(self, units: Sequence[RolloutUnit], first: bool = False) -> None:
        """Adds units to be sampled; they begin at once. first: before those that wait already."""
        with self._changed:
            self._results.units |= {unit.name: unit for unit in units}
            self.scheduler.add({unit.name: unit.cost for unit in units}, first)
        self._thread.wake()

    def wait_for(self, unit: RolloutUnit, meanwhile: Callable[[], None] = lambda: None) -> list[Trace]:
        """Waits for a unit's samples, and forgets it. meanwhile: called while it waits, at every news. Raises
        NoWorkers, UnitRefused, Fenced, StorageError."""
        since = time.monotonic()
        while not self.has_samples([unit]):
            with self._changed:
                self._thread.check()
                silent_s = time.monotonic() - max(since, self.roster.alive_at)
                if not self.scheduler.workers and silent_s > self.wait_s:
                    raise NoWorkers(
                        f"no rollout worker for {silent_s:.0f} s (fleet.wait_s): start some with"
                        f" fleet.run={self.objects.seal.run_id}; the run goes on from its checkpoint then"
                    )
                if unit.name not in self._results.samples:
                    self._changed.wait(1.0)
            meanwhile()
        with self._changed:
            return self._results.take(unit.name)

    def has_samples(self, units: Sequence[RolloutUnit]) -> bool:
        with self._changed:
            return all(unit.name in self._results.samples for unit in units)

    def probe_with(self, unit: RolloutUnit) -> None:
        """From now on a worker that joins samples this unit, under a name of its own, and nothing else until
        it is admitted. The learner holds the weights of its version."""
        with self._changed:
            self._probes.renew(unit)

    def probing(self) -> set[str]:
        with self._changed:
            return self._probes.pending()

    def probed(self) -> list[tuple[str, str, list[Trace]]]:
        """(worker, its device, what it sampled) of the probes that have come in."""
        with self._changed:
            sampled = self._probes.take_sampled()
            return [(name, self.roster.workers[name].heartbeat.device, traces) for name, traces in sampled]

    def admit(self, worker: str) -> None:
        self._say(f"worker {worker} is admitted")
        with self._changed:
            self._probes.admit(worker)

    def turn_away(self, worker: str, why: str) -> None:
        """Tells a worker to end, and why; it gets no units."""
        self._say(f"worker {worker} is turned away: {why}")
        self._announcement.turn_away(worker, why)
        with self._changed:
            self.counts.turned_away += 1
            self._probes.end_probe(worker)
            self.scheduler.remove_worker(worker)
        self._thread.wake()

    def pause(self) -> None:
        """Waits for something new, a second at most."""
        with self._changed:
            self._changed.wait(1.0)

    def close(self, state: str, why: str, outdated: Iterable[str] = ()) -> None:
        """Ends the thread and says why this head is silent from now on. outdated: objects that are deleted
        then. Raises Fenced, StorageError."""
        self._thread.stop()
        self._requests.stop_waiting()
        try:
            if self._thread.error is None:
                self._announcement.change(state=state, why=why)
                self._announcement.write_if_due()
                self.delete(outdated)
        finally:
            self._requests.close(finish_deleting=self._thread.error is None)

    def take_metrics(self) -> dict[str, float]:
        with self._changed:
            return self.counts.take_metrics()

    def rows(self) -> list[dict[str, Any]]:
        """Every worker that was seen: what it is, what it did, and whether it lives or why it ended."""
        with self._changed:
            return [self._row(name) for name in sorted(self.roster.workers)]

    def _row(self, name: str) -> dict[str, Any]:
        heartbeat = self.roster.workers[name].heartbeat
        lost_s = self.scheduler.lost_s
        comes = heartbeat.state in NOT_READY and self.roster.silent_s(name) < lost_s and not heartbeat.goodbye
        silent = f"silent for more than {lost_s:.0f} s"
        why = self._turned_away.get(name) or heartbeat.goodbye or silent
        lives = name in self.scheduler.workers or comes
        return {
            "worker": name,
            "host": heartbeat.host,
            "device": heartbeat.device,
            "lives": lives,
            "why": "" if lives else why,
            "state": heartbeat.state,
            "completions": self.counts.by_worker.get(name, 0),
            "completions_per_s": heartbeat.rate if lives else 0.0,
        }

    # --- the thread -----------------------------------------------------------------------------------------

    @property
    def _turned_away(self) -> Mapping[str, str]:
        return self._announcement.newest.turned_away

    def _play_round(self) -> None:
        began = time.monotonic()
        self._announcement.write_if_due()
        heartbeats = self.roster.read(self._names_due(began))
        for worker, heartbeat in heartbeats.items():
            self._see(worker, heartbeat)
        self._take_in(heartbeats)
        for worker, heartbeat in heartbeats.items():
            self._see_off(worker, heartbeat.goodbye)
        if time.monotonic() - began > HEARTBEAT_S:  # the store was slow, or away: nobody could be seen
            self._restart_clocks()
        self._mail()

    def _restart_clocks(self) -> None:
        with self._changed:
            self.scheduler.restart_clocks(time.monotonic())

    def _names_due(self, now: float) -> Sequence[str]:
        """Workers whose heartbeats are read: those that sample, and from time to time everyone."""
        alive = list(self.scheduler.workers)
        listing = self.roster.list_due(now)
        if alive and not listing:
            return alive
        if listing:
            self.roster.list_all(now)
            for worker in self.roster.workers.values():
                if worker.heartbeat.state != SAMPLING:  # mail that somebody has overwritten is written again
                    worker.mailed = None
        return self.roster.everyone()

    def _refuse_heartbeat(self, worker: str, why: str) -> None:
        if worker not in self._turned_away:
            self.turn_away(worker, f"{why}: its code is another")

    def _see(self, name: str, heartbeat: HeartbeatRecord) -> None:
        known = self.roster.workers.get(name)
        before = known.heartbeat if known else None
        if before is None:
            self._say(f"worker {name} joins ({heartbeat.device} on {heartbeat.host})")
        elif heartbeat.origin != before.origin:
            self._say(f"worker {name} begins anew ({heartbeat.device} on {heartbeat.host})")
            self._forget(name)
        elif heartbeat.pieces != before.pieces:
            self._engine_moved()
        now = time.monotonic()
        with self._changed:
            self.roster.update(name, heartbeat)
            if name in self._turned_away:
                return
            self.roster.note_alive(name, now)
            if not heartbeat.goodbye and heartbeat.state not in NOT_READY:
                # the short completions of a probe say nothing of its speed
                rate = heartbeat.rate if name in self.counts.by_worker else 0.0
                self.scheduler.heartbeat(name, now, rate, self._probes.may_sample(name))

    def _see_off(self, worker: str, goodbye: str) -> None:
        if goodbye and worker in self.scheduler.workers:
            self._say(f"worker {worker} leaves: {goodbye}")
            with self._changed:
                self.scheduler.remove_worker(worker)

    def _forget(self, name: str) -> None:
        with self._changed:
            self._probes.forget(name)
            if known := self.roster.workers.get(name):
                known.refused_in_a_row = 0
            self.scheduler.remove_worker(name)

    def _take_in(self, heartbeats: Mapping[str, HeartbeatRecord]) -> None:
        """Reads, checks and keeps what workers have sent, and deletes it in the bucket."""
        sent = []
        for worker, heartbeat in heartbeats.items():
            if worker not in self._turned_away:
                sent += [self._sent(worker, given) for given in self._intake.unread(worker, heartbeat.sent)]
        for unit, received in self._intake.read(sent):
            self._keep_or_refuse(unit, received)
            # Only now: what the store did not let it read is read with the worker's next heartbeat.
            self._intake.mark_read(unit)
            self.delete([unit.key])

    def _sent(self, worker: str, given: GivenUnit) -> SentUnit:
        key = keys.samples_key(self.attempt.name, given.unit, given.turn, worker)
        if probe := self._probes.probe_of(worker, given.unit):
            return SentUnit(worker, given, key, probe, is_probe=True)
        wanted = given.unit in self.scheduler.unfinished and self._probes.may_sample(worker)
        return SentUnit(worker, given, key, self._results.units.get(given.unit) if wanted else None)

    def _keep_or_refuse(self, sent: SentUnit, received: Received) -> None:
        if sent.worker in self._turned_away:
            return
        with self._changed:
            # somebody else's may have come while this was read
            late = not sent.is_probe and sent.given.unit not in self.scheduler.unfinished
            if late or sent.unit is None:
                self.counts.late += 1
            elif isinstance(received, list):
                self._keep(sent, sent.unit, received)
            elif not isinstance(received, RefusedSamples):
                self.counts.forged += 1
                self._say(f"{received}: it is sampled again")
                self.scheduler.requeue(sent.given, sent.worker)
                self._probes.end_probe(sent.worker)
        if isinstance(received, RefusedSamples) and sent.is_probe:
            self.turn_away(sent.worker, f"its probe is refused: {received}")
        elif isinstance(received, RefusedSamples) and not late:
            self._refuse(sent.worker, sent.given, str(received))

    def _keep(self, sent: SentUnit, unit: RolloutUnit, traces: list[Trace]) -> None:
        if sent.is_probe:
            self.scheduler.unqueue(sent.given, sent.worker)
            if self._probes.keep_sampled(sent.worker, unit, traces):
                self._changed.notify_all()
            return
        known = self.roster.workers[sent.worker]
        known.refused_in_a_row = 0
        self.counts.count_accepted(sent.worker, known.heartbeat.device, len(traces))
        self.scheduler.finish(unit.name)
        self._results.keep(unit.name, traces)
        self._changed.notify_all()

    def _refuse(self, worker: str, given: GivenUnit, why: str) -> None:
        """Lets a unit be sampled again, and ends a worker, or the run, of which too much was refused."""
        self.counts.refused += 1
        key = keys.refused_key(self.attempt.name, given.unit, given.turn, worker)
        self.objects.put_record(key, RefusedUnit(given.unit, worker, why))
        self._say(f"unit {given.unit} of worker {worker} is refused: {why}")
        with self._changed:
            known = self.roster.workers[worker]
            known.refused_in_a_row += 1
            unfinished = self.scheduler.requeue(given, worker)
            # A broken card says nothing of the unit: elsewhere that is a function of its seeds.
            if unfinished and NOT_FINITE not in why:
                self._results.count_refusal(given.unit, worker)
            refused = self._results.refusals.get(given.unit, [])
            others = len(self.scheduler.workers) > 1
        if known.refused_in_a_row == MOST_IN_A_ROW:
            self.turn_away(
                worker, f"{MOST_IN_A_ROW} units of it in a row were refused, the last because {why}"
            )
        if len(set(refused) if others else refused) >= MOST_REFUSALS:
            raise UnitRefused(
                f"unit {given.unit} was sampled and refused {len(refused)} times, the last time because"
                f" {why}: its samples are a function of its seeds, so another worker would send the same"
            )

    def _mail(self) -> None:
        with self._changed:
            written = self._announcement.written
            announced = written.version if written else -1
            self.counts.count_lived([bool(worker.queue) for worker in self.scheduler.workers.values()])
            self._probes.assign(announced)
            units = self._results.units
            unready = {name for name in self.scheduler.unfinished if units[name].version > announced}
            queues = self.scheduler.schedule(time.monotonic(), unready)
            mail: dict[str, Mail] = {}
            for name, known in self.roster.workers.items():
                queue = queues.get(name)
                if queue is None:
                    known.mailed = None
                elif queue != known.mailed:
                    mail[name] = Mail(
                        tuple(
                            MailedUnit(
                                self._probes.probe_of(name, given.unit) or units[given.unit], given.turn
                            )
                            for given in queue
                        )
                    )
        if any(letter.units for letter in mail.values()):
            self.attempt.check()

        def send(name: str) -> None:
            self.objects.put_record(keys.mail_key(self.attempt.name, name), mail[name])
            self.roster.workers[name].mailed = queues[name]

        list(self._requests.pool.map(send, mail))
