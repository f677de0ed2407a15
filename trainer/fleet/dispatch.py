"""The head's thread: it watches the workers, takes in what they send, and mails out what comes next.

The trainer's own thread offers units and waits for them. So weights may be published, and steps may be
trained, while units of later steps are sampled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.algorithm.traces import Trace
from trainer.checkpoint.attempt import Attempt
from trainer.errors import StorageError, StoreRefused
from trainer.fleet import objects as keys
from trainer.fleet.counts import OWN, Counts, roster_entry
from trainer.fleet.objects import Objects
from trainer.fleet.probes import Probes
from trainer.fleet.scheduler import LOADING, NOT_READY, Claim, Given, Scheduler
from trainer.fleet.units import UNREADABLE, RolloutUnit, unpack
from trainer.fleet.verify import NOT_FINITE, AskedUnit, mark_refusal, refusal
from trainer.storage.seal import Forged

BEAT_S = 5.0
"""Seconds between two marks of a head or a worker that has nothing new to say."""
LIST_S = 10.0
"""Seconds between two looks for workers that are new."""
FORGET_S = 3600.0
"""Silence after which a worker's mark and mail are deleted; until then they tell a person how it ended."""
POLL_S = 1.0
PARALLEL = 8
"""Objects that are read at a time."""
LOADING_S = 3600.0
"""Longest time for which a worker that builds its engine counts as one that will come."""
MOST_REFUSALS = 2
"""Workers that may send samples of one unit that are refused; then the run ends."""
MOST_IN_A_ROW = 3
"""Units of one worker that may be refused in a row; then it is told to end."""
MOST_IN_VAIN = 20
"""Steps and evaluations in a row for which a worker beside the trainer's own engines may sample nothing that
is used; then it is told to end."""


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
        own_engines: bool = False,
        say: Callable[[str], None] = print,
        moved: Callable[[], None] = lambda: None,
        poll_s: float = POLL_S,
    ) -> None:
        """own_engines: whether the trainer's own engines sample what nobody else can. moved: called, from the
        head's thread, when a worker's engine has made progress."""
        self.objects, self.held = objects, held
        self.expected = expected
        self.wait_s, self.poll_s = wait_s, poll_s
        self._say, self._moved_on = say, moved
        self.scheduler = Scheduler(lost_s, own_engines=own_engines)
        self.counts = Counts()
        self.beats: dict[str, dict[str, Any]] = {}
        """The newest beat of every worker that was seen."""
        self._head: dict[str, Any] = {"attempt": held.name, "state": "running", "why": ""}
        self._head |= {"version": 0, "lineage": "", "anchors": []}
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
        self._written = self._listed = self._checked = -LIST_S
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
            return [(name, self.beats[name]["device"], traces) for name, traces in self._probes.take()]

    def admit(self, worker: str) -> None:
        """The worker may have units."""
        self._say(f"worker {worker} is admitted")
        with self._changed:
            self._probes.admit(worker)

    def turn_away(self, worker: str, why: str) -> None:
        """The worker is told to end, and why; it gets no units. Raises Fenced, StorageError."""
        self._say(f"worker {worker} is turned away: {why}")
        with self._changed:
            self.counts.turned_away += 1
            self._turned_away[worker] = why
            self._head = self._head | {"turned_away": dict(self._turned_away)}
            self._probes.drop(worker)
            self.scheduler.leave(worker)
        self.announce()  # or else the next mark says it

    def claim(self, what: Claim) -> list[Given]:
        """Units for the trainer's own engines; none where nothing of that kind is left. A worker that was of
        no use for long is told to end. Raises what ended the thread."""
        with self._changed:
            if self._error is not None:
                raise self._error
            claimed = self.scheduler.claim(what)
            workers = self.scheduler.workers.items()
            useless = [name for name, seen in workers if seen.in_vain > MOST_IN_VAIN]
        for name in useless:
            self.turn_away(
                name,
                f"nothing that it samples was used for {MOST_IN_VAIN} steps and evaluations in a row: others"
                " end each unit sooner. Smaller units (fleet.unit_prompts) leave a slow machine a share",
            )
        return claimed

    def give(self, sampled: Mapping[Given, list[Trace]], share_s: float | None = None) -> None:
        """What the trainer's own engines sampled in one go. share_s: how long that took where it was their
        share of a step. A few units take as long as many, so others do not tell their speed."""
        with self._changed:
            if share_s is not None:
                self.scheduler.own_rate = sum(map(len, sampled.values())) / max(share_s, 1e-3)
            for given, traces in sampled.items():
                if given.unit not in self.scheduler.cost:
                    self.counts.late += 1
                    continue
                self.counts.own += 1
                self.counts.sampled_on(OWN, len(traces))
                self._accept(given.unit, traces)

    def pause(self) -> None:
        """Waits for something new, a second at most."""
        with self._changed:
            self._changed.wait(1.0)

    def close(self, state: str, why: str) -> None:
        """Ends the thread and says why this head is silent from now on."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown()
        if self._error is None:
            self.announce(state=state, why=why)

    def idle_share(self) -> float:
        """Share of the workers' time since the last call in which they had no unit; 0 without workers."""
        with self._changed:
            return self.counts.take_idle_share()

    def take_by_device(self) -> dict[str, float]:
        """Completions by what sampled them, since the last call, as metrics."""
        with self._changed:
            return self.counts.take_by_device()

    def roster(self) -> list[dict[str, Any]]:
        """Every worker that was seen: what it is, what it did, and whether it lives or why it ended."""
        with self._changed:
            return [self._worker(name, beat) for name, beat in sorted(self.beats.items())]

    def _worker(self, name: str, beat: dict[str, Any]) -> dict[str, Any]:
        seen_at = self._moved.get(name, (0, 0.0))[1]
        fetches = beat["state"] in NOT_READY and time.monotonic() - seen_at < self.scheduler.lost_s
        lives = name in self.scheduler.workers or (fetches and not beat["goodbye"])
        why = ""
        if not lives:
            silent = f"silent for more than {self.scheduler.lost_s:.0f} s"
            why = self._turned_away.get(name) or beat["goodbye"] or silent
        return roster_entry(beat, lives, why, self.counts.by_worker.get(name, 0))

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
            self._forget(name)
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
        if beat is None:
            return None
        if why := mark_refusal(beat, worker):
            self._malformed(worker, why)
            return None
        if self._moved.get(worker, (-1, 0.0))[0] == beat["serial"]:
            return None
        self._moved[worker] = (beat["serial"], time.monotonic())
        return beat if beat["attempt"] == self.held.name else None

    def _malformed(self, worker: str, why: str) -> None:
        """A mark that this code did not write: its worker is told once, and not looked at again before the
        next listing."""
        self._known.discard(worker)
        if worker not in self._turned_away:
            self.turn_away(worker, f"its mark {why}: its code is another")

    def _see(self, worker: str, beat: dict[str, Any]) -> None:
        before = self.beats.get(worker)
        if before is None:
            self._say(f"worker {worker} joins ({beat['device']} on {beat['host']})")
        elif any(before.get(fact) != beat.get(fact) for fact in ("host", "process", "device")):
            self._say(f"worker {worker} begins anew ({beat['device']} on {beat['host']})")
            self._forget(worker)
        elif beat["pieces"] != before["pieces"]:
            self._moved_on()
        self.beats[worker] = beat
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

    def _forget(self, worker: str) -> None:
        """The name is another process's from now on, which is not admitted."""
        with self._changed:
            self._probes.forget(worker)
            self._in_a_row.pop(worker, None)
            self.scheduler.leave(worker)

    def _take_in(self, worker: str, given: Given) -> None:
        """Reads, checks and keeps what a worker has sent, and deletes it in the bucket."""
        unit = self._units.get(given.unit)
        step = self._steps.get(given.unit, 0)
        key = keys.samples_key(self.held.name, step, given.unit, given.turn, worker)
        probe = self._probes.of(worker, given.unit)
        if probe is not None:
            self._read_probe(worker, given, probe, key)
        elif unit is None or given.unit not in self.scheduler.cost or not self._probes.may_sample(worker):
            self.counts.late += 1
        else:
            self._read(worker, given, unit, key)
        self._pool.submit(self.objects.storage.delete, [key])

    def _received(self, worker: str, given: Given, unit: RolloutUnit, key: str) -> list[Trace] | str | None:
        """What a worker sent of a unit, or why it is refused; None where a stranger has written it."""
        try:
            sampled = unpack(self.objects.get(key, self.expected.most_bytes(unit)))
            why = refusal(unit, given.turn, worker, sampled, self.expected)
        except (Forged, FileNotFoundError) as error:
            self.counts.forged += 1
            with self._changed:
                self.scheduler.fail(given, worker)
            self._say(f"{error}: it is sampled again")
            return None
        except UNREADABLE as error:
            return f"it cannot be read: {error}"
        return why or sampled.traces

    def _read_probe(self, worker: str, given: Given, unit: RolloutUnit, key: str) -> None:
        found = self._received(worker, given, unit, key)
        if isinstance(found, str):
            self.turn_away(worker, f"its probe is refused: {found}")
            return
        with self._changed:
            self.scheduler.fail(given, worker)  # it has done it
            if self._probes.came_in(worker, unit, found):
                self._changed.notify_all()

    def _read(self, worker: str, given: Given, unit: RolloutUnit, key: str) -> None:
        found = self._received(worker, given, unit, key)
        if found is None:
            return
        if isinstance(found, str):
            self._refuse(worker, given, found)
            return
        with self._changed:
            if given.unit not in self.scheduler.cost:  # somebody else's came while this was read
                self.counts.late += 1
                return
            self._in_a_row.pop(worker, None)
            if seen := self.scheduler.workers.get(worker):
                seen.in_vain = 0
            self.counts.accepted(worker, self.beats[worker]["device"], len(found))
            self._accept(given.unit, found)

    def _accept(self, unit: str, traces: list[Trace]) -> None:
        self.scheduler.done(unit)
        self._refused.pop(unit, None)
        self._traces[unit] = traces
        self._changed.notify_all()

    def _refuse(self, worker: str, given: Given, why: str) -> None:
        self.counts.refused += 1
        key = keys.refused_key(self.held.name, given.unit, given.turn, worker)
        self.objects.put_json(key, {"unit": given.unit, "worker": worker, "why": why})
        self._say(f"unit {given.unit} of worker {worker} is refused: {why}")
        with self._changed:
            in_a_row = self._in_a_row[worker] = self._in_a_row.get(worker, 0) + 1
            again = self.scheduler.fail(given, worker)
            # A broken card says nothing of the unit: elsewhere that is a function of its seeds.
            if again and not self.scheduler.own_engines and NOT_FINITE not in why:
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
            self._steps |= {probe.name: probe.step for probe in self._probes.give()}
            queues = self.scheduler.tick(time.monotonic())
            fresh = {name: queue for name, queue in queues.items() if queue != self._mailed.get(name)}
            mail: dict[str, list[dict[str, Any]]] = {}
            for name, queue in fresh.items():
                units = [(self._probes.of(name, one.unit) or self._units[one.unit], one) for one in queue]
                mail[name] = [unit.to_json() | {"turn": one.turn} for unit, one in units]
            self._mailed = queues
        if any(mail.values()):
            self.held.check()
        for name, asked in mail.items():
            self.objects.put_json(keys.mail_key(self.held.name, name), asked)
