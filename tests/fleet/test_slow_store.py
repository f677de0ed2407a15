"""A store that takes its time: what the head and a worker ask of it side by side, and who waits for it."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

from tests.fleet.test_dispatch import PlayedWorker, until
from tests.fleet.test_dispatch import head as head
from tests.fleet.test_mirror import Trainer
from tests.fleet.test_verify import UNIT, good
from trainer.errors import StorageError
from trainer.fleet.heartbeat import IDLE, SAMPLING
from trainer.fleet.objects import samples_key
from trainer.fleet.scheduler import Given
from trainer.fleet.units import pack
from trainer.fleet.worker import Sender

MET_S = 20.0
"""Longest time that requests wait for each other here."""


def side_by_side(monkeypatch, storage, name: str, folder: str, count: int) -> threading.Event:
    """From now on so many requests for a folder are answered once all of them are there; the event says that
    they were. Mail that asks for nothing, which a worker gets when it joins, is no such request."""
    real = getattr(storage, name)
    met = threading.Event()
    meeting = threading.Barrier(count, action=met.set, timeout=MET_S)

    def waiting(key: str, *more: object) -> object:
        empty = any(isinstance(data, bytes) and data.endswith(b"[]") for data in more)
        if key.startswith(folder) and not empty and not met.is_set():
            meeting.wait()
        return real(key, *more)

    monkeypatch.setattr(storage, name, waiting)
    return met


def several(folder, one, count: int) -> list[PlayedWorker]:
    """Workers that have joined, and are seen."""
    workers = [PlayedWorker(folder, f"w{number}") for number in range(count)]
    for worker in workers:
        worker.join(one.held.name)
    until(lambda: len(one.scheduler.workers) == count)
    return workers


def test_mail_goes_out_and_samples_come_in_side_by_side(head, tmp_path, monkeypatch):
    one = head()
    workers = several(tmp_path, one, 6)
    mailed = side_by_side(monkeypatch, one.objects.storage, "put_bytes", "mail/", 6)
    units = [replace(UNIT, name=f"{number:06d}") for number in range(6)]
    one.offer(units)
    until(mailed.is_set)
    asked = [worker.mail() for worker in workers]
    read = side_by_side(monkeypatch, one.objects.storage, "get_bytes", "samples/", 6)
    for worker, seen in zip(workers, asked, strict=True):
        unit, given = seen.mail[0]
        key = samples_key(seen.attempt, unit.step, given.unit, given.turn, worker.name)
        worker.objects.put(key, pack(unit, given.turn, worker.name, good()))
    looked = threading.Event()
    with monkeypatch.context() as held:
        held.setattr(
            one, "_due", lambda now: looked.set() or []
        )  # so that the head sees all six in one round
        assert looked.wait(MET_S), "the round before has ended"
        for worker, seen in zip(workers, asked, strict=True):
            worker.heartbeat.sent(seen.attempt, seen.mail[0][1], 4, 4.0)
    until(lambda: one.has(units))
    assert read.is_set() and one.counts.units == 6


def test_a_worker_fetches_the_patches_of_all_ranks_side_by_side(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path)
    mirror = trainer.mirror()
    trainer.bring(mirror, 0)
    trainer.publish(1)
    fetched = side_by_side(monkeypatch, trainer.objects.storage, "get_bytes", "weights/1-aaaaaa/", 2)
    trainer.bring(mirror, 1)
    assert fetched.is_set() and trainer.holds(mirror, 1)


def test_the_trainer_does_not_wait_for_what_the_head_writes(head, tmp_path, monkeypatch):
    """A store that takes a word of the head only when this test says so."""
    one = head()
    (worker,) = several(tmp_path, one, 1)
    real = one.objects.storage.put_bytes
    asked, taken = threading.Event(), threading.Event()

    def held(key: str, data: bytes) -> None:
        if key.startswith("head/"):
            asked.set()
            assert taken.wait(MET_S)
        real(key, data)

    monkeypatch.setattr(one.objects.storage, "put_bytes", held)
    one.announce(version=6)
    assert asked.wait(MET_S)
    one.offer([UNIT])
    one.announce({"weights/00000007-ab.json": {"version": 7}}, version=7)
    assert not one.has([UNIT]) and not one.probing() and one.roster() and one.claim("rest")
    assert not taken.is_set(), "none of these has waited"
    taken.set()

    def announced() -> bool:
        return (one.objects.get_json(f"head/{one.held.name}.json") or {}).get("version") == 7

    until(announced)
    assert one.objects.get_json("weights/00000007-ab.json") == {"version": 7}


def test_mail_is_written_where_it_changed(head, tmp_path, monkeypatch):
    one = head()
    (worker,) = several(tmp_path, one, 1)
    worker.heartbeat.say(state=SAMPLING)
    one.offer([UNIT])
    worker.mail()
    until(lambda: one.workers.newest["w0"]["state"] == SAMPLING)
    written: Counter[str] = Counter()
    real_put, real_list = one.objects.storage.put_bytes, one.objects.storage.list

    def counted_put(key: str, data: bytes) -> None:
        written[key.partition("/")[0]] += 1
        real_put(key, data)

    def counted_list(folder: str) -> object:
        written["listings"] += 1
        return real_list(folder)

    monkeypatch.setattr(one.objects.storage, "put_bytes", counted_put)
    monkeypatch.setattr(one.objects.storage, "list", counted_list)
    until(lambda: written["listings"] > 3)
    assert written["mail"] == 0
    worker.heartbeat.say(state=IDLE)  # it may have found none
    until(lambda: written["mail"])


def test_samples_are_sent_while_the_next_unit_is_sampled_and_none_is_lost(tmp_path, capsys):
    worker = PlayedWorker(tmp_path, "w0")
    worker.join("1-a")
    there, away = threading.Event(), threading.Event()
    real = worker.objects.put

    def put(key: str, body: bytes) -> None:
        if not there.is_set():
            away.set()
            raise StorageError("the store is away")
        real(key, body)

    worker.objects.put = put  # ty: ignore[invalid-assignment]
    sender = Sender(worker.objects, worker.heartbeat, 0.01)
    sender.follow("1-a")
    sender.send("1-a", Given("000001", 1), "samples/one", b"1", 4, 1.0)
    assert not sender.is_full() and away.wait(MET_S)
    sender.send("1-a", Given("000002", 1), "samples/two", b"2", 4, 1.0)
    assert sender.is_full(), "no third unit is begun"
    there.set()
    until(lambda: not sender.is_full() and not sender._unsent)
    assert worker.heartbeat._state["sent"] == [["000001", 1], ["000002", 1]]
    assert "the store is away" in capsys.readouterr().out
    there.clear()
    away.clear()
    sender.send("1-a", Given("000003", 1), "samples/three", b"3", 4, 1.0)
    assert away.wait(MET_S)
    sender.follow("2-b")  # its trainer has begun anew, and asks again
    there.set()
    until(lambda: not sender.is_full() and not sender._unsent)
    assert len(worker.heartbeat._state["sent"]) == 2
    assert not worker.objects.storage.exists("samples/three")
