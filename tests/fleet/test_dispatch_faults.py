"""The head's thread against workers that are broken, odd or slow to come, and a store that refuses."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tests.fleet.test_dispatch import PlayedWorker, serial_of
from tests.fleet.test_dispatch import head as head
from tests.fleet.test_verify import UNIT, good
from tests.waiting import until
from trainer.fleet.fleet_records import GivenUnit
from trainer.fleet.objects import samples_key, worker_key
from trainer.fleet.sample_intake import pack_samples
from trainer.system.errors import StoreRefused


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
                unit, given = mailed.unit, mailed.given
                if given not in sent:
                    sent.add(given)
                    key = samples_key(seen.attempt, given.unit, given.turn, worker.name)
                    worker.objects.put(key, pack_samples(unit, given.turn, worker.name, traces))
                    worker.heartbeat.add_sent(seen.attempt, given, 4.0)
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
    unit, given = seen.mail[0].unit, seen.mail[0].given
    key = samples_key(seen.attempt, given.unit, given.turn, "away")
    away.objects.put(key, pack_samples(unit, given.turn, "away", good()))
    away.heartbeat.add_sent(seen.attempt, given, 4.0)
    serial = away.heartbeat._newest.serial
    until(lambda: serial_of(one, "away") == serial)
    well.join(one.attempt.name)
    well.send()
    assert len(one.wait_for(UNIT)) == 4 and key not in read
    assert one.counts.by_worker == {"well": 4}
