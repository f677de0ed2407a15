"""Who samples what: every unit ends once, whoever dies, comes late or is slow."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.fleet.scheduler import COPIES, DEPTH, Claim, GivenUnit, Scheduler

EVENTS = ("offer", "join", "work", "work", "work", "die", "leave", "fail", "late", "pause", "claim", "own")


@settings(max_examples=200, deadline=None)
@given(events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), max_size=60))
def test_any_interleaving_ends_every_unit_once(events):
    """Workers join, work, die silently, leave, send rubbish, or send what another has sent before; the
    trainer's own engines take units too."""
    scheduler = Scheduler(lost_s=10.0)
    now = 0.0
    offered, done = 0, dict[str, int]()
    alive: dict[str, float] = {}
    queues: dict[str, list[GivenUnit]] = {}
    late: list[str] = []
    claimed: list[str] = []

    def end(unit: str) -> None:
        if unit in scheduler.cost:
            done[unit] = done.get(unit, 0) + 1
        scheduler.done(unit)

    def work(name: str) -> None:
        if queues.get(name):
            unit = queues[name].pop(0).unit
            late.append(unit)
            end(unit)

    def tick(passed: float) -> None:
        nonlocal now, queues
        now += passed
        for name in alive:
            scheduler.beat(name, now, alive[name])
        queues = scheduler.tick(now)
        for queue in queues.values():
            assert len(queue) <= DEPTH and len({given.unit for given in queue}) == len(queue)
        owners = [given.unit for queue in queues.values() for given in queue]
        assert all(owners.count(unit) <= COPIES for unit in owners)
        assert set(owners) <= scheduler.cost.keys()
        waiting = [given.unit for queue in queues.values() for given in queue[1:]]
        assert not set(waiting) & set(claimed), "what the trainer's engines sample is given to nobody else"

    for event, number in events:
        name = f"w{number}"
        match event:
            case "offer":
                scheduler.offer({f"u{offered + i:03d}": 1.0 + number for i in range(number)})
                offered += number
            case "join":
                alive[name] = float(number)
            case "work":
                work(name)
            case "die":
                alive.pop(name, None)
            case "leave":
                alive.pop(name, None)
                scheduler.leave(name)
            case "fail" if queues.get(name):
                scheduler.fail(queues[name][0], name)
            case "late" if late:
                scheduler.done(late[0])
            case "claim":
                taken = scheduler.claim(("share", "rest", "late")[number % 3])
                claimed += [one.unit for one in taken]
                assert len(set(claimed)) == len(claimed)
            case "own" if claimed:
                end(claimed.pop(0))
            case "pause":
                now += 100.0
                scheduler.forgive(now)
        tick(1.0)

    alive |= {"last": 1.0, "other": 0.0}
    for unit in claimed:
        end(unit)
    for _ in range(40 + 3 * offered):
        tick(4.0)
        for name in list(alive):
            work(name)
    assert done == {f"u{i:03d}": 1 for i in range(offered)}
    assert not scheduler.cost and not any(queues.values())


def filled(rates: dict[str, float], units: int) -> Scheduler:
    scheduler = Scheduler(lost_s=30.0)
    scheduler.offer({f"u{i}": 10.0 for i in range(units)})
    for name, rate in rates.items():
        scheduler.beat(name, 0.0, rate)
    return scheduler


def named(queues: dict[str, list[GivenUnit]]) -> dict[str, list[str]]:
    return {name: [given.unit for given in queue] for name, queue in queues.items()}


def test_units_go_in_order_to_who_would_end_them_first():
    queues = named(filled({"fast": 10.0, "slow": 1.0}, 3).tick(0.0))
    assert queues == {"fast": ["u0", "u1"], "slow": ["u2"]}


def test_what_the_trainer_waits_for_goes_before_what_nobody_has_yet():
    scheduler = filled({"a": 1.0}, 4)
    scheduler.tick(0.0)
    scheduler.offer({"evaluation": 1.0}, first=True)
    scheduler.done("u0")
    assert named(scheduler.tick(0.0)) == {"a": ["u1", "evaluation"]}


def test_a_silent_workers_units_are_the_next_to_be_given_out():
    scheduler = filled({"a": 1.0, "b": 1.0}, 6)
    before = named(scheduler.tick(0.0))
    scheduler.beat("b", 31.0, 1.0)
    for unit in before["b"]:
        scheduler.done(unit)
    after = scheduler.tick(31.0)
    assert named(after) == {"b": before["a"]} and [given.turn for given in after["b"]] == [2, 2]
    assert scheduler.lost == 1 and scheduler.again == 2


def test_an_idle_worker_doubles_what_a_slow_one_would_end_last():
    scheduler = filled({"fast": 10.0, "slow": 0.1}, 4)
    assert named(scheduler.tick(0.0)) == {"fast": ["u0", "u1"], "slow": ["u2", "u3"]}
    scheduler.done("u0")
    scheduler.done("u1")
    assert named(scheduler.tick(1.0)) == {"fast": ["u3"], "slow": ["u2", "u3"]}
    scheduler.done("u3")
    assert named(scheduler.tick(2.0)) == {"fast": ["u2"], "slow": ["u2"]} and scheduler.doubled == 2


def test_a_worker_that_joins_late_gets_the_next_units():
    scheduler = filled({"a": 1.0}, 5)
    scheduler.tick(0.0)
    scheduler.beat("b", 1.0, 0.0)
    assert named(scheduler.tick(1.0)) == {"a": ["u0", "u1"], "b": ["u2", "u3"]}


def test_refused_samples_are_asked_of_another_worker():
    scheduler = filled({"a": 1.0, "b": 1.0}, 1)
    queues = scheduler.tick(0.0)
    (owner,) = [name for name, queue in queues.items() if queue[0].turn == 1]
    (other,) = {"a", "b"} - {owner}
    scheduler.leave(other)
    scheduler.beat(other, 0.0, 1.0)
    assert scheduler.fail(GivenUnit("u0", 1), owner) == 1
    again = scheduler.tick(1.0)
    assert named(again) == {owner: [], other: ["u0"]}
    assert scheduler.fail(again[other][0], other) == 2


def test_where_there_is_no_other_worker_it_is_asked_of_the_same():
    scheduler = filled({"a": 1.0}, 1)
    assert scheduler.fail(scheduler.tick(0.0)["a"][0], "a") == 1
    assert scheduler.tick(1.0)["a"] == [GivenUnit("u0", 2)]


def test_a_store_that_was_away_makes_nobody_late():
    scheduler = filled({"a": 1.0}, 1)
    scheduler.tick(0.0)
    scheduler.forgive(500.0)
    assert scheduler.tick(501.0) == {"a": [GivenUnit("u0", 1)]} and scheduler.lost == 0


class Machine:
    """A played worker: its speed, how long it lives, and what it works on."""

    def __init__(self, rng: random.Random, born: float) -> None:
        self.rate = rng.choice([0.5, 1.0, 2.0, 4.0])
        self.dies = born + rng.expovariate(1 / 400)
        self.beats = born
        self.work: dict[GivenUnit, float] = {}
        """When each unit of its queue will be sampled."""


@pytest.mark.parametrize("seed", range(5))
def test_fifty_workers_that_die_and_come_back_lose_no_unit(seed):
    """Ten steps of 200 units; every machine lives for 400 s in the mean, and is replaced after 60."""
    rng, scheduler = random.Random(seed), Scheduler(lost_s=30.0)
    machines = {f"m{i}": Machine(rng, 0.0) for i in range(50)}
    coming: list[float] = []
    now, results = 0.0, dict[str, int]()
    made, deaths = 50, 0
    for step in range(10):
        units = [f"s{step}.{i:03d}" for i in range(200)]
        scheduler.offer(dict.fromkeys(units, 8.0))
        while scheduler.cost:
            now += 1.0
            for name in [name for name, machine in machines.items() if now > machine.dies]:
                del machines[name]
                coming.append(now + 60)
                deaths += 1
            while coming and coming[0] <= now:
                coming.pop(0)
                machines[f"m{made}"] = Machine(rng, now)
                made += 1
            for name, machine in machines.items():
                if now >= machine.beats + 5:
                    machine.beats = now
                    scheduler.beat(name, now, machine.rate)
                for one, ends in list(machine.work.items()):
                    if now >= ends:
                        del machine.work[one]
                        if one.unit in scheduler.cost:
                            results[one.unit] = results.get(one.unit, 0) + 1
                        scheduler.done(one.unit)
            for name, queue in scheduler.tick(now).items():
                if name in machines:
                    machine = machines[name]
                    at = now
                    kept = {one: machine.work[one] for one in queue if one in machine.work}
                    for one in queue:
                        at = kept.get(one, max(at, now) + 8.0 / machine.rate)
                        kept[one] = at
                    machine.work = kept
            assert now < 20_000
    assert results == {f"s{step}.{i:03d}": 1 for step in range(10) for i in range(200)}
    assert deaths > 10 and scheduler.lost > 0


def claimed(scheduler: Scheduler, what: Claim) -> list[str]:
    return [one.unit for one in scheduler.claim(what)]


def test_the_trainers_own_engines_take_the_last_units_by_their_share_of_the_speed():
    scheduler = filled({"w": 1.0}, 10)
    scheduler.own_rate = 4.0
    scheduler.tick(0.0)  # w: u0, u1
    assert claimed(scheduler, "share") == [f"u{i}" for i in range(2, 10)], "eight of ten"
    assert named(scheduler.tick(1.0)) == {"w": ["u0", "u1"]}, "nothing else is left for it"
    for number in range(1, 10):
        scheduler.done(f"u{number}")
    assert claimed(scheduler, "rest") == [], "a worker samples what is left"
    assert claimed(scheduler, "late") == ["u0"] and scheduler.doubled == 1


def test_units_that_a_slow_worker_has_not_begun_are_taken_back():
    scheduler = filled({"slow": 0.1}, 8)
    scheduler.own_rate = 10.0
    scheduler.tick(0.0)
    assert claimed(scheduler, "share") == [f"u{i}" for i in range(1, 8)]
    assert named(scheduler.tick(1.0)) == {"slow": ["u0"]}
    assert scheduler.again == 0


def test_fast_workers_get_most_of_a_step_and_the_trainers_engines_at_least_a_unit():
    scheduler = filled({"a": 50.0, "b": 50.0}, 8)
    scheduler.own_rate = 1.0
    assert claimed(scheduler, "share") == ["u7"]
    assert named(scheduler.tick(0.0)) == {"a": ["u0", "u2"], "b": ["u1", "u3"]}
    for number in range(8):
        scheduler.done(f"u{number}")
    assert claimed(scheduler, "share") == []


def test_while_a_speed_is_unknown_every_worker_has_one_unit():
    scheduler = filled({"a": 0.0, "b": 0.0}, 8)
    assert claimed(scheduler, "share") == [f"u{i}" for i in range(2, 8)]
    scheduler = filled({"a": 1.0}, 8)
    assert claimed(scheduler, "share") == [f"u{i}" for i in range(1, 8)], "its own speed is unknown"
    assert claimed(filled({}, 3), "share") == ["u0", "u1", "u2"], "nobody else is there"


def test_a_unit_that_workers_have_twice_is_no_bar_to_the_trainers_engines():
    scheduler = filled({"slow": 0.1}, 1)
    scheduler.tick(0.0)
    scheduler.beat("idle", 1.0, 0.1)
    assert named(scheduler.tick(1.0)) == {"slow": ["u0"], "idle": ["u0"]}
    assert claimed(scheduler, "late") == ["u0"]
    scheduler.beat("third", 2.0, 9.0)
    assert named(scheduler.tick(2.0))["third"] == [], "three have it"


def test_what_the_trainers_engines_sample_is_doubled_by_no_idle_worker():
    scheduler = filled({"slow": 0.1}, 1)
    scheduler.tick(0.0)
    assert claimed(scheduler, "late") == ["u0"]
    scheduler.beat("idle", 1.0, 9.0)
    assert named(scheduler.tick(1.0)) == {"slow": ["u0"], "idle": []}
