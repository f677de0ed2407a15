"""Who samples what: every unit ends once, whoever dies, comes late or is slow."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.fleet.fleet_records import GivenUnit
from trainer.fleet.scheduler import MOST_COPIES, MOST_QUEUED, Scheduler

EVENTS = ("offer", "join", "work", "work", "work", "die", "leave", "fail", "late", "pause")


@settings(max_examples=200, deadline=None)
@given(events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), max_size=60))
def test_any_interleaving_ends_every_unit_once(events):
    """Workers join, work, die silently, leave, send rubbish, or send what another has sent before."""
    scheduler = Scheduler(lost_s=10.0)
    now = 0.0
    offered, done = 0, dict[str, int]()
    alive: dict[str, float] = {}
    queues: dict[str, list[GivenUnit]] = {}
    late: list[str] = []

    def end(unit: str) -> None:
        if unit in scheduler.unfinished:
            done[unit] = done.get(unit, 0) + 1
        scheduler.finish(unit)

    def work(name: str) -> None:
        if queues.get(name):
            unit = queues[name].pop(0).unit
            late.append(unit)
            end(unit)

    def tick(passed: float) -> None:
        nonlocal now, queues
        now += passed
        for name in alive:
            scheduler.heartbeat(name, now, alive[name])
        queues = scheduler.schedule(now)
        for queue in queues.values():
            assert len(queue) <= MOST_QUEUED and len({given.unit for given in queue}) == len(queue)
        owners = [given.unit for queue in queues.values() for given in queue]
        assert all(owners.count(unit) <= MOST_COPIES for unit in owners)
        assert set(owners) <= scheduler.unfinished.keys()

    for event, number in events:
        name = f"w{number}"
        match event:
            case "offer":
                scheduler.add({f"u{offered + i:03d}": 1.0 + number for i in range(number)})
                offered += number
            case "join":
                alive[name] = float(number)
            case "work":
                work(name)
            case "die":
                alive.pop(name, None)
            case "leave":
                alive.pop(name, None)
                scheduler.remove_worker(name)
            case "fail" if queues.get(name):
                scheduler.requeue(queues[name][0], name)
            case "late" if late:
                scheduler.finish(late[0])
            case "pause":
                now += 100.0
                scheduler.restart_clocks(now)
        tick(1.0)

    alive |= {"last": 1.0, "other": 0.0}
    for _ in range(40 + 3 * offered):
        tick(4.0)
        for name in list(alive):
            work(name)
    assert done == {f"u{i:03d}": 1 for i in range(offered)}
    assert not scheduler.unfinished and not any(queues.values())


def filled(rates: dict[str, float], units: int) -> Scheduler:
    scheduler = Scheduler(lost_s=30.0)
    scheduler.add({f"u{i}": 10.0 for i in range(units)})
    for name, rate in rates.items():
        scheduler.heartbeat(name, 0.0, rate)
    return scheduler


def named(queues: dict[str, list[GivenUnit]]) -> dict[str, list[str]]:
    return {name: [given.unit for given in queue] for name, queue in queues.items()}


def test_units_go_in_order_to_who_would_end_them_first():
    queues = named(filled({"fast": 10.0, "slow": 1.0}, 3).schedule(0.0))
    assert queues == {"fast": ["u0", "u1"], "slow": ["u2"]}


def test_what_the_trainer_waits_for_goes_before_what_nobody_has_yet():
    scheduler = filled({"a": 1.0}, 4)
    scheduler.schedule(0.0)
    scheduler.add({"evaluation": 1.0}, first=True)
    scheduler.finish("u0")
    assert named(scheduler.schedule(0.0)) == {"a": ["u1", "evaluation"]}


def test_a_silent_workers_units_are_the_next_to_be_given_out():
    scheduler = filled({"a": 1.0, "b": 1.0}, 6)
    before = named(scheduler.schedule(0.0))
    scheduler.heartbeat("b", 31.0, 1.0)
    for unit in before["b"]:
        scheduler.finish(unit)
    after = scheduler.schedule(31.0)
    assert named(after) == {"b": before["a"]} and [given.turn for given in after["b"]] == [2, 2]
    assert scheduler.lost == 1 and scheduler.reassigned == 2


def test_an_idle_worker_doubles_what_a_slow_one_would_end_last():
    scheduler = filled({"fast": 10.0, "slow": 0.1}, 4)
    assert named(scheduler.schedule(0.0)) == {"fast": ["u0", "u1"], "slow": ["u2", "u3"]}
    scheduler.finish("u0")
    scheduler.finish("u1")
    assert named(scheduler.schedule(1.0)) == {"fast": ["u3"], "slow": ["u2", "u3"]}
    scheduler.finish("u3")
    assert named(scheduler.schedule(2.0)) == {"fast": ["u2"], "slow": ["u2"]} and scheduler.duplicated == 2


def test_a_worker_that_joins_late_gets_the_next_units():
    scheduler = filled({"a": 1.0}, 5)
    scheduler.schedule(0.0)
    scheduler.heartbeat("b", 1.0, 0.0)
    assert named(scheduler.schedule(1.0)) == {"a": ["u0", "u1"], "b": ["u2", "u3"]}


def test_refused_samples_are_asked_of_another_worker():
    scheduler = filled({"a": 1.0, "b": 1.0}, 1)
    queues = scheduler.schedule(0.0)
    (owner,) = [name for name, queue in queues.items() if queue[0].turn == 1]
    (other,) = {"a", "b"} - {owner}
    scheduler.remove_worker(other)
    scheduler.heartbeat(other, 0.0, 1.0)
    assert scheduler.requeue(GivenUnit("u0", 1), owner) == 1
    again = scheduler.schedule(1.0)
    assert named(again) == {owner: [], other: ["u0"]}
    assert scheduler.requeue(again[other][0], other) == 2


def test_where_there_is_no_other_worker_it_is_asked_of_the_same():
    scheduler = filled({"a": 1.0}, 1)
    assert scheduler.requeue(scheduler.schedule(0.0)["a"][0], "a") == 1
    assert scheduler.schedule(1.0)["a"] == [GivenUnit("u0", 2)]


def test_a_store_that_was_away_makes_nobody_late():
    scheduler = filled({"a": 1.0}, 1)
    scheduler.schedule(0.0)
    scheduler.restart_clocks(500.0)
    assert scheduler.schedule(501.0) == {"a": [GivenUnit("u0", 1)]} and scheduler.lost == 0
