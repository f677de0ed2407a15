"""A store that takes its time: what the head and a worker ask of it side by side, and who waits for it."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoint.synthetic import configure
from tests.fleet.test_dispatch import PlayedWorker
from tests.fleet.test_dispatch import head as head
from tests.fleet.test_verify import UNIT, good
from tests.fleet.test_weight_mirror import Trainer
from tests.waiting import until
from trainer.checkpoint.attempt import AttemptFenced, Attempts
from trainer.fleet.fleet_records import IDLE, SAMPLING, GivenUnit, HeadRecord
from trainer.fleet.objects import head_key, patch_key, samples_key
from trainer.fleet.sample_intake import pack_samples
from trainer.fleet.weight_publisher import PublisherPart, VersionPublisher
from trainer.fleet.worker import Sender
from trainer.storage.seal import KEY_VARIABLE
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError

MET_S = 20.0
"""Longest time that requests wait for each other here."""


def side_by_side(monkeypatch, storage, name: str, folder: str, count: int) -> threading.Event:
    """From now on so many requests for a folder are answered once all of them are there; the event says that
    they were. Mail that asks for nothing, which a worker gets when it joins, is no such request."""
    real = getattr(storage, name)
    met = threading.Event()
    meeting = threading.Barrier(count, action=met.set, timeout=MET_S)

    def waiting(key: str, *more: object) -> object:
        empty = any(isinstance(data, bytes) and data.endswith(b'{"units":[]}') for data in more)
        if key.startswith(folder) and not empty and not met.is_set():
            meeting.wait()
        return real(key, *more)

    monkeypatch.setattr(storage, name, waiting)
    return met


def several(folder, one, count: int) -> list[PlayedWorker]:
    """Workers that have joined, and are seen."""
    workers = [PlayedWorker(folder, f"w{number}") for number in range(count)]
    for worker in workers:
        worker.join(one.attempt.name)
    until(lambda: len(one.scheduler.workers) == count)
    return workers


def test_mail_goes_out_and_samples_come_in_side_by_side(head, tmp_path, monkeypatch):
    one = head()
    workers = several(tmp_path, one, 6)
    mailed = side_by_side(monkeypatch, one.objects.storage, "put_bytes", "mail/", 6)
    units = [replace(UNIT, name=f"{number:06d}") for number in range(6)]
    one.add_units(units)
    until(mailed.is_set)
    asked = [worker.mail() for worker in workers]
    read = side_by_side(monkeypatch, one.objects.storage, "get_bytes", "samples/", 6)
    for worker, seen in zip(workers, asked, strict=True):
        unit, given = seen.mail[0].unit, seen.mail[0].given
        key = samples_key(seen.attempt, given.unit, given.turn, worker.name)
        worker.objects.put(key, pack_samples(unit, given.turn, worker.name, good()))
    looked = threading.Event()
    with monkeypatch.context() as held:
        # so that the head sees all six in one round
        held.setattr(one, "_names_due", lambda now: looked.set() or [])
        assert looked.wait(MET_S), "the round before has ended"
        for worker, seen in zip(workers, asked, strict=True):
            worker.heartbeat.add_sent(seen.attempt, seen.mail[0].given, 4.0)
    until(lambda: one.has_samples(units))
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
    one.add_units([UNIT])
    one.announce({"weights/00000007-ab.json": {"version": 7}}, version=7)
    assert not one.has_samples([UNIT]) and not one.probing() and one.rows()
    assert not taken.is_set(), "none of these has waited"
    taken.set()

    def announced() -> bool:
        return (
            head_says := one.objects.get_record(head_key(one.attempt.name), HeadRecord)
        ) and head_says.version == 7

    until(announced)
    assert one.objects.get_record("weights/00000007-ab.json", dict) == {"version": 7}


def test_a_version_is_announced_and_asked_for_when_every_rank_s_patch_is_there(head, tmp_path):
    one = head()
    (worker,) = several(tmp_path, one, 1)
    storage = one.objects.storage
    patches = [patch_key(one.attempt.name, 7, rank) for rank in range(2)]
    manifest = "weights/00000007-ab.json"
    newer = replace(UNIT, name="000002", version=7, lineage="ab")

    def head_says() -> HeadRecord:
        return one.objects.get_record(head_key(one.attempt.name), HeadRecord)

    storage.put_bytes("weights/old", b"old")
    one.publish(patches, {manifest: {"version": 7}}, ["weights/old"], version=7, lineage="ab")
    one.publish([], {"weights/00000008-cd.json": {"version": 8}}, [], version=8, lineage="cd")
    one.add_units([newer, UNIT])
    assert [mailed.unit.name for mailed in worker.mail().mail] == [UNIT.name], "the other has no weights yet"
    storage.put_bytes(patches[1], b"patch of rank 1")
    serial = head_says().serial
    one.announce(anchors=())
    until(lambda: head_says().serial > serial)
    assert head_says().version == 6 and not storage.exists(manifest) and storage.exists("weights/old")
    storage.put_bytes(patches[0], b"patch of rank 0")
    until(lambda: head_says().version == 8)
    assert storage.exists(manifest) and one.objects.get_record("weights/00000008-cd.json", dict) == {
        "version": 8
    }
    until(lambda: len(worker.mail().mail) == 2 and not storage.exists("weights/old"))


def test_a_fenced_head_announces_no_version_and_deletes_nothing(head, tmp_path):
    one = head()
    one.objects.storage.put_bytes("weights/old", b"old")
    Attempts(Storage(tmp_path / "run/attempts")).take(0)
    one.publish([], {"weights/00000007-ab.json": {"version": 7}}, ["weights/old"], version=7)
    with pytest.raises(AttemptFenced):
        one.wait_for(UNIT)
    assert [key for key, _ in one.objects.storage.list("weights")] == ["weights/old"]


class HeldStore:
    """A store that takes a patch only when a test says so."""

    def __init__(self, storage, monkeypatch) -> None:
        self.asked: list[str] = []
        self.takes = threading.Event()
        self.error: Exception | None = None
        self._put = storage.put_bytes
        monkeypatch.setattr(storage, "put_bytes", self.put)

    def put(self, key: str, data: bytes) -> None:
        self.asked.append(key)
        assert self.takes.wait(MET_S)
        if self.error is not None:
            raise self.error
        self._put(key, data)


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """A rank's publisher, its shard, and a new attempt's name; the policy is a tensor."""
    monkeypatch.setenv(KEY_VARIABLE, "0123456789abcdef0123456789abcdef")
    config = configure(tmp_path, "fleet.workers=only")
    shard = torch.arange(100, dtype=torch.bfloat16)
    pieces = [SimpleNamespace(name="w", start=0, stop=100, values=shard)]
    partition, states = SimpleNamespace(pieces=lambda: pieces), SimpleNamespace(reload=lambda: None)
    learner = SimpleNamespace(policy=SimpleNamespace(states=states, partition=partition))
    part = PublisherPart(SimpleNamespace(config=config, rank=3, part=lambda kind: learner))
    part.open()
    return part, shard, Attempts.of(config)


def test_a_rank_learns_on_while_its_patch_is_sent_and_keeps_one_more_at_most(rank, monkeypatch):
    part, shard, attempts = rank
    name = attempts.take(0).name
    store = HeldStore(part.storage, monkeypatch)
    shard += 1
    part.publish(1, name, False)
    shard += 1  # an update, while the store holds the patch
    assert not part.has_sent()
    second = threading.Thread(target=part.publish, args=(2, name, False))
    second.start()
    until(lambda: store.asked)
    second.join(0.2)
    assert second.is_alive() and store.asked == [patch_key(name, 1, 3)]
    store.takes.set()
    second.join(MET_S)
    part.settle()
    assert part.has_sent() and store.asked == [patch_key(name, 1, 3), patch_key(name, 2, 3)]
    sizes = [part.storage.size(key) for key in store.asked]
    assert None not in sizes


def test_a_patch_that_the_store_does_not_take_ends_the_run_by_name(rank, monkeypatch):
    part, shard, attempts = rank
    name = attempts.take(0).name
    store = HeldStore(part.storage, monkeypatch)
    store.error = StorageError("the store is full")
    part.publish(1, name, False)
    store.takes.set()
    with pytest.raises(StorageError, match="the store is full"):
        part.settle()
    with pytest.raises(StorageError, match="the store is full"):
        part.has_sent()
    with pytest.raises(StorageError, match="the store is full"):
        part.publish(2, name, False)
    assert len(store.asked) == 1, "no version comes after it"


def test_a_trainer_that_waits_for_samples_hears_of_a_patch_that_was_not_sent(rank, monkeypatch):
    part, shard, attempts = rank
    held = attempts.take(0)
    ranks = SimpleNamespace(all=lambda method, *args: [method(part, *args)])
    publisher = VersionPublisher(part.process.config, ranks, held, Any, Any, "")
    store = HeldStore(part.storage, monkeypatch)
    store.error = StorageError("the store is full")
    part.publish(1, held.name, False)
    publisher._all_sent = False
    publisher.check_sending()
    assert not publisher._all_sent, "it is on its way"
    store.takes.set()
    with pytest.raises(StorageError, match="the store is full"):
        until(publisher.check_sending)


def test_a_rank_of_an_attempt_that_was_replaced_sends_nothing(rank):
    part, shard, attempts = rank
    name = attempts.take(0).name
    newer = attempts.take(0).name
    shard += 1
    part.publish(1, name, False)
    with pytest.raises(AttemptFenced, match=newer):
        part.settle()
    assert not part.storage.list("weights")


def test_mail_is_written_where_it_changed(head, tmp_path, monkeypatch):
    one = head()
    (worker,) = several(tmp_path, one, 1)
    worker.heartbeat.write(state=SAMPLING)
    one.add_units([UNIT])
    worker.mail()
    until(lambda: one.roster.workers["w0"].heartbeat.state == SAMPLING)
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
    worker.heartbeat.write(state=IDLE)  # it may have found none
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
    sender.send("1-a", GivenUnit("000001", 1), "samples/one", b"1", 1.0)
    assert not sender.is_full() and away.wait(MET_S)
    sender.send("1-a", GivenUnit("000002", 1), "samples/two", b"2", 1.0)
    assert sender.is_full(), "no third unit is begun"
    there.set()
    until(lambda: not sender.is_full() and not sender._unsent)
    assert worker.heartbeat._newest.sent == (GivenUnit("000001", 1), GivenUnit("000002", 1))
    assert "the store is away" in capsys.readouterr().out
    there.clear()
    away.clear()
    sender.send("1-a", GivenUnit("000003", 1), "samples/three", b"3", 1.0)
    assert away.wait(MET_S)
    sender.follow("2-b")  # its trainer has begun anew, and asks again
    there.set()
    until(lambda: not sender.is_full() and not sender._unsent)
    assert len(worker.heartbeat._newest.sent) == 2
    assert not worker.objects.storage.exists("samples/three")
