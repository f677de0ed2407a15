"""The head's thread against played workers that speak through a real folder: what it takes, refuses, and asks
for again."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fleet.jobs import about_run
from tests.fleet.test_verify import EXPECTED, UNIT, good
from tests.waiting import until
from trainer.checkpoint.attempt import AttemptFenced, Attempts
from trainer.fleet import dispatch, head_thread, roster
from trainer.fleet.dispatch import Dispatcher, NoWorkers, UnitRefused
from trainer.fleet.fleet_records import GivenUnit, MailedUnit, RolloutUnit
from trainer.fleet.objects import Objects, about_key, mail_key, samples_key, worker_key
from trainer.fleet.run_follower import RunFollower, SeenRun
from trainer.fleet.sample_intake import SentUnit, pack_samples
from trainer.fleet.worker_heartbeat import WorkerHeartbeat
from trainer.observe import beacon
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError, StoreRefused

KEY = b"0123456789abcdef"


class PlayedWorker:
    """A worker whose engine is a function."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.objects = Objects(Storage(folder / "run/fleet"), Seal("run", KEY))
        record = Attempts(Storage(folder / "run/attempts"))
        self.following = RunFollower(self.objects, record, name)
        self.heartbeat = WorkerHeartbeat(self.objects, name, "cpu")

    def join(self, attempt: str) -> None:
        self.heartbeat.write(attempt=attempt, state="idle")

    def mail(self) -> SeenRun:
        """Waits for a unit."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            seen = self.following.look()
            if seen is not None and seen.mail:
                return seen
            time.sleep(0.01)
        raise AssertionError(f"{self.name} got no unit")

    def send_mailed(self, seen: SeenRun, mailed: MailedUnit, traces: list, body: bytes | None = None) -> str:
        """Sends something for a unit of its mail, `body` unsigned; returns where it lies."""
        given = mailed.given
        key = samples_key(seen.attempt, given.unit, given.turn, self.name)
        if body is None:
            self.objects.put(key, pack_samples(mailed.unit, given.turn, self.name, traces))
        else:
            self.objects.storage.put_bytes(key, body)
        self.heartbeat.add_sent(seen.attempt, given, 4.0)
        return key

    def send(self, traces: list | None = None, body: bytes | None = None) -> None:
        """Sends something for the first unit of its mail."""
        seen = self.mail()
        self.send_mailed(seen, seen.mail[0], good() if traces is None else traces, body)


class Heads:
    """Heads of attempts of one run, and workers that are played."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempts = Attempts(Storage(folder / "run/attempts"))
        self.begun: list[Dispatcher] = []

    def __call__(self, lost_s: float = 30.0, wait_s: float = 30.0, **options: Any) -> Dispatcher:
        """A dispatcher whose attempt has begun."""
        held = self.attempts.take(0)
        objects = Objects(Storage(self.folder / "run/fleet"), Seal("run", KEY))
        said: list[str] = []
        options |= {"lost_s": lost_s, "wait_s": wait_s, "say": said.append, "poll_s": 0.02}
        one = Dispatcher(objects, held, EXPECTED, **options)
        one.said = said  # ty: ignore[unresolved-attribute]
        objects.put_record(about_key(held.name), about_run(held.name))
        one.announce(version=6, lineage=UNIT.lineage)
        one.start()
        self.begun.append(one)
        return one

    def worker(self, name: str) -> PlayedWorker:
        """A worker that has not joined."""
        return PlayedWorker(self.folder, name)

    def joined(self, *names: str, probe: RolloutUnit | None = None, **options: Any) -> tuple[Any, ...]:
        """A dispatcher, and workers that have joined it. probe: what it has them sample first."""
        one = self(**options)
        if probe is not None:
            one.probe_with(probe)
        workers = [self.worker(name) for name in names]
        for worker in workers:
            worker.join(one.attempt.name)
        return one, *workers


@pytest.fixture
def head(tmp_path, monkeypatch):
    """Begins attempts, whose heads are ended after the test."""
    monkeypatch.setattr(roster, "LIST_S", 0.02)
    heads = Heads(tmp_path)
    yield heads
    for one in heads.begun:
        one.close("away", "the test has ended")


def serial_of(one: Dispatcher, name: str) -> int:
    """The serial of a worker's newest heartbeat that the head has seen; -1 before the first."""
    known = one.roster.workers.get(name)
    return known.heartbeat.serial if known else -1


def send_another(worker: PlayedWorker, sent: list[str], traces) -> None:
    """Waits until the worker's mail begins with a unit that is not among `sent`, and sends traces for it."""
    until(lambda: worker.mail().mail[0].unit.name not in sent)
    sent.append(worker.mail().mail[0].unit.name)
    worker.send(traces)


def test_a_unit_goes_out_and_its_samples_come_back(head, tmp_path):
    one, worker = head.joined("w0")
    one.add_units([UNIT])
    worker.send()
    assert len(one.wait_for(UNIT)) == 4 and one.counts.units == 1
    # deleted once they were read, folders too: os.walk passes over what vanishes meanwhile
    until(lambda: not any(names for _, _, names in os.walk(tmp_path / "run/fleet/samples")))
    until(lambda: not worker.following.look().mail)


def test_every_mark_of_an_engine_that_goes_on_is_progress(head):
    moved: list[float] = []
    one = head(engine_moved=lambda: moved.append(time.monotonic()))
    worker = head.worker("w0")
    for number in range(1, 4):
        worker.join(one.attempt.name)
        until(lambda: serial_of(one, "w0") == worker.heartbeat._newest.serial)
        assert len(moved) == number - 1, "nothing was sampled since"
        beacon.count_piece()
        worker.join(one.attempt.name)
        until(lambda number=number: len(moved) == number)


def test_what_a_stranger_wrote_is_asked_for_again(head):
    one, worker = head.joined("w0")
    one.add_units([UNIT])
    worker.send(body=os.urandom(3000))
    until(lambda: one.counts.forged == 1 and worker.mail().mail[0].given.turn == 2)
    worker.send()
    assert len(one.wait_for(UNIT)) == 4


def test_a_refused_unit_goes_to_another_worker_and_the_reason_is_kept(head, tmp_path):
    one, first, other = head.joined("w0", "w1")  # of two that would end it at once, the first by name
    until(lambda: len(one.scheduler.workers) == 2)
    one.add_units([UNIT])
    first.send(good()[:-1])
    until(lambda: one.counts.refused == 1 and list((tmp_path / "run/fleet/refused").rglob("*.json")))
    (reason,) = (tmp_path / "run/fleet/refused").rglob("*.json")
    assert "lacks a completion" in reason.read_text("latin1")
    other.send()
    assert len(one.wait_for(UNIT)) == 4


def test_refused_twice_ends_the_run_with_the_reason(head):
    one, worker = head.joined("w0")
    one.add_units([UNIT])
    worker.send(good()[:-1])
    until(lambda: one.counts.refused == 1 and worker.mail().mail[0].given.turn == 2)
    worker.send(good()[:-1])
    with pytest.raises(UnitRefused, match="lacks a completion"):
        one.wait_for(UNIT)


def test_a_refusal_after_a_loss_is_the_first(head):
    """The unit's second turn, by the only worker that is left."""
    one, gone = head.joined("w0")
    worker = head.worker("w1")
    one.add_units([UNIT])
    gone.mail()
    gone.heartbeat.goodbye("the machine is taken away")
    worker.join(one.attempt.name)
    worker.send(good()[:-1])
    until(lambda: one.counts.refused == 1 and worker.mail().mail[0].given.turn == 3)
    worker.send()
    assert len(one.wait_for(UNIT)) == 4


def test_three_refused_units_in_a_row_turn_a_worker_away_and_another_samples_them(head):
    one, broken, sound = head.joined("w0", "w1")
    until(lambda: len(one.scheduler.workers) == 2)
    units = [replace(UNIT, name=f"00000{number}") for number in range(8)]
    one.add_units(units)
    sent: list[str] = []
    for count in (1, 2, 3):
        send_another(broken, sent, good()[:-1])
        until(lambda count=count: one.counts.refused == count)
    until(lambda: broken.following.look() and broken.following.turned_away)
    assert "3 units of it in a row were refused, the last because it lacks a completion" in str(one.said[-1])
    assert one.counts.turned_away == 1 and set(one.scheduler.workers) == {"w1"}
    sent.clear()
    for count in range(1, 9):
        send_another(sound, sent, good())
        until(lambda count=count: one.counts.units == count)
    assert one.has_samples(units)


def test_an_accepted_unit_among_three_refused_ones_turns_nobody_away(head):
    one, worker, other = head.joined("w0", "w1")
    until(lambda: len(one.scheduler.workers) == 2)
    one.add_units([replace(UNIT, name=f"00000{number}") for number in range(6)])
    sent: list[str] = []
    for number in (1, 2, 3, 4):
        send_another(worker, sent, good() if number == 3 else good()[:-1])
        until(lambda number=number: one.counts.refused + one.counts.units == number)
    assert one.counts.refused == 3 and one.counts.turned_away == 0


def test_a_silent_workers_unit_goes_to_the_next_that_comes(head):
    one = head(lost_s=0.3)
    gone = head.worker("w0")
    gone.join(one.attempt.name)
    one.add_units([UNIT])
    gone.mail()
    until(lambda: one.scheduler.lost == 1)
    late = head.worker("w1")
    late.join(one.attempt.name)
    late.send()
    assert len(one.wait_for(UNIT)) == 4 and one.scheduler.reassigned == 1


def test_a_worker_that_says_goodbye_is_not_waited_for(head):
    one, leaving = head.joined("w0")
    other = head.worker("w1")
    one.add_units([UNIT])
    leaving.mail()
    leaving.heartbeat.goodbye("aws: spot instance will terminate")
    other.join(one.attempt.name)
    other.send()
    assert len(one.wait_for(UNIT)) == 4 and one.scheduler.lost == 0
    assert any("aws: spot instance" in line for line in one.said)


def test_without_any_worker_the_trainer_ends(head):
    one = head(wait_s=0.3)
    one.add_units([UNIT])
    with pytest.raises(NoWorkers, match="fleet.wait_s"):
        one.wait_for(UNIT)


def test_strangers_among_the_workers_are_counted_and_not_asked(head):
    one, worker = head.joined("w0")
    storage = worker.objects.storage
    storage.put_bytes(worker_key("copied"), storage.get_bytes(worker_key("w0")))
    storage.put_bytes(worker_key("noise"), os.urandom(99))
    one.add_units([UNIT])
    worker.send()
    one.wait_for(UNIT)
    until(lambda: one.counts.forged >= 2)
    assert set(one.scheduler.workers) == {"w0"}
    two = replace(UNIT, name="000005")
    one.add_units([two])
    worker.mail()
    storage.put_bytes(mail_key(one.attempt.name, "w0"), os.urandom(99))
    assert worker.mail().mail[0].unit == two  # it was written again


def test_an_attempt_that_was_replaced_is_left_by_its_workers_and_ends(head, monkeypatch):
    """The old head goes on: it may neither announce nor mail, and nobody looks at it."""
    monkeypatch.setattr(head_thread, "HEARTBEAT_S", 0.05)
    old = head()
    worker = head.worker("w0")
    worker.join(old.attempt.name)
    old.add_units([UNIT])
    worker.mail()
    new = head()
    worker.following.look_for_newer()
    assert worker.following.newest() == new.attempt.name
    with pytest.raises(AttemptFenced):
        old.wait_for(UNIT)
    with pytest.raises(AttemptFenced):
        old.announce(version=7)
    worker.heartbeat.follow(new.attempt.name)
    worker.heartbeat.write(state="idle")
    new.add_units([UNIT])
    worker.send()
    assert len(new.wait_for(UNIT)) == 4


def test_late_samples_of_a_doubled_unit_change_nothing(head):
    one, slow = head.joined("w0")
    fast = head.worker("w1")
    one.add_units([UNIT])
    slow.mail()
    fast.join(one.attempt.name)
    fast.send()
    assert len(one.wait_for(UNIT)) == 4 and one.scheduler.duplicated == 1
    until(lambda: any(name == "w1" for name, _ in one._intake._units_read))
    (given,) = [given for name, given in one._intake._units_read if name == "w1"]
    slow.objects.put(samples_key(one.attempt.name, given.unit, given.turn, "w0"), b"late")
    slow.heartbeat.add_sent(one.attempt.name, given, 1.0)
    until(lambda: one.counts.late == 1)
    assert one.counts.units == 1
    until(lambda: not any(key.endswith(".npz") for key, _ in slow.objects.storage.list("samples")))


def test_samples_that_the_store_did_not_give_are_read_with_the_next_beat(head, monkeypatch):
    one, worker = head.joined("w0")
    one.add_units([UNIT])
    get, failed = one.objects.get, []

    def away(key: str, *limit: int) -> bytes:
        if key.startswith("samples/") and not failed:
            failed.append(key)
            raise StorageError("the store is away")
        return get(key, *limit)

    monkeypatch.setattr(one.objects, "get", away)
    worker.send()
    until(lambda: failed)
    worker.join(one.attempt.name)
    assert len(one.wait_for(UNIT)) == 4 and one.counts.units == 1


def test_a_store_that_answers_late_makes_nobody_lost(head, monkeypatch):
    monkeypatch.setattr(dispatch, "HEARTBEAT_S", 0.2)
    one, worker = head.joined("w0", lost_s=0.6)
    until(lambda: one.scheduler.workers)
    answer, asked = one.objects.get_record, []

    def late(key: str, kind: type) -> object:
        record = answer(key, kind)
        if not asked:
            asked.append(key)
            time.sleep(1.0)
            worker.join(one.attempt.name)
        return record

    monkeypatch.setattr(one.objects, "get_record", late)
    serial = worker.heartbeat._newest.serial
    until(lambda: serial_of(one, "w0") > serial)
    assert asked and one.scheduler.lost == 0


def test_samples_that_were_read_while_others_were_taken_are_late(head):
    one = head()
    one.add_units([UNIT])
    worker, second = head.worker("w0"), head.worker("w1")
    worker.join(one.attempt.name)
    worker.send()
    assert len(one.wait_for(UNIT)) == 4
    key = samples_key(one.attempt.name, UNIT.name, 2, "w1")
    second.objects.put(key, pack_samples(UNIT, 2, "w1", good()))
    sent = SentUnit("w1", GivenUnit(UNIT.name, 2), key, UNIT)
    for read in one._intake.read([sent]):
        one._keep_or_refuse(*read)
    assert (one.counts.late, one.counts.units) == (1, 1)
    assert not one._results.samples, "nobody would ever take it"


# --- workers that are broken, odd or slow to come, and a store that refuses ---------------------------------


def broken() -> list:
    """The good unit as a card that computes nothing but NaN sends it."""
    return [replace(one, logprobs=np.full(len(one.completion), np.nan, np.float32)) for one in good()]


def test_a_worker_that_turned_to_nan_is_sent_away_and_the_run_goes_on(head):
    one = head()
    bad, well = head.worker("bad"), head.worker("well")
    units = [replace(UNIT, name=f"{number:06d}") for number in range(4)]

    def send_all_until(worker: PlayedWorker, traces: list, over: Callable[[], object]) -> None:
        sent: set[GivenUnit] = set()
        while not over():
            seen = worker.following.look()
            for mailed in seen.mail if seen else ():
                if mailed.given not in sent:
                    sent.add(mailed.given)
                    worker.send_mailed(seen, mailed, traces)
            time.sleep(0.01)

    bad.join(one.attempt.name)
    one.add_units(units)
    send_all_until(bad, broken(), lambda: "bad" in one._turned_away)
    assert "not finite" in one._turned_away["bad"]
    well.join(one.attempt.name)
    send_all_until(well, good(), lambda: one.has_samples(units))
    assert one._thread.error is None and one.counts.units == 4


def test_a_heartbeat_without_a_field_is_told_to_its_worker_and_ends_nothing(head):
    one = head()
    worker = head.worker("w0")
    worker.objects.put_record(worker_key("odd"), {"attempt": one.attempt.name, "serial": 1})
    until(lambda: "odd" in one._turned_away)
    assert "Object missing required field `worker`: its code is another" in one._turned_away["odd"]
    worker.join(one.attempt.name)
    one.add_units([UNIT])
    worker.send()
    assert len(one.wait_for(UNIT)) == 4


def test_a_large_object_of_a_stranger_is_not_read(head, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    one = head()
    path = tmp_path / "run/fleet" / worker_key("big")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(1 << 30)
    until(lambda: one.counts.forged)
    for number in range(200):
        (path.parent / f"foreign-{number}.json").write_bytes(os.urandom(64))
    worker = head.worker("w0")
    worker.join(one.attempt.name)
    one.add_units([UNIT])
    worker.send()
    assert len(one.wait_for(UNIT)) == 4
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown << 10 < 256 << 20


def test_a_worker_that_loads_is_waited_for(head, monkeypatch):
    monkeypatch.setattr("trainer.fleet.worker_heartbeat.HEARTBEAT_S", 0.1)
    one = head(wait_s=1.2)
    worker = head.worker("w0")
    worker.heartbeat.begin(one.attempt.name, "cpu")
    one.add_units([UNIT])
    began = time.monotonic()

    def samples_at_last() -> None:
        if time.monotonic() - began > 2.5 and worker.heartbeat._newest.state == "loading":
            worker.join(one.attempt.name)
            worker.send()

    assert len(one.wait_for(UNIT, samples_at_last)) == 4, "twice fleet.wait_s have passed meanwhile"
    worker.heartbeat.goodbye("done")


def test_a_store_that_refuses_once_it_has_served_is_silence(head, monkeypatch):
    one, worker = head.joined("w0")
    until(lambda: "w0" in one.roster.workers)
    real = one.objects.storage.get_bytes
    refused: list[str] = []

    def refusing(*arguments, **options):
        if len(refused) < 3:
            refused.append("")
            raise StoreRefused("download of x: the key has no right to do this (403 AccessDenied)")
        return real(*arguments, **options)

    monkeypatch.setattr(one.objects.storage, "get_bytes", refusing)
    one.add_units([UNIT])
    until(lambda: len(refused) == 3)
    worker.send()
    assert len(one.wait_for(UNIT)) == 4
    until(lambda: any("store is back" in line for line in one.said))
    assert any("403" in line for line in one.said)


def test_nothing_is_read_that_a_worker_sends_after_it_was_turned_away(head, monkeypatch):
    one, away = head.joined("away")
    well = head.worker("well")
    one.add_units([UNIT])
    seen = away.mail()
    one.turn_away("away", "its weights are others")
    read: list[str] = []
    real = one.objects.get

    def counted(key: str, *limit: int) -> bytes:
        read.append(key)
        return real(key, *limit)

    monkeypatch.setattr(one.objects, "get", counted)
    key = away.send_mailed(seen, seen.mail[0], good())
    serial = away.heartbeat._newest.serial
    until(lambda: serial_of(one, "away") == serial)
    well.join(one.attempt.name)
    well.send()
    assert len(one.wait_for(UNIT)) == 4 and key not in read
    assert one.counts.by_worker == {"well": 4}
