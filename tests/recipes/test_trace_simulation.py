"""Workers on the spot machines of a public trace, played."""

import json
import math
import random
from dataclasses import replace
from itertools import islice

import pytest

from benchmarks import fleet_simulation, plan_tables, trace_simulation
from benchmarks.fleet_simulation import FleetWork
from benchmarks.trace_simulation import SpotTrace, TracedPlay

WORK = FleetWork(
    steps=1,
    units=(10.0,),
    ahead=2,
    update_s=4.0,
    switch_s=3.0,
    workers=1,
    save_steps=20,
    worker_back_s=20.0,
    trainer_back_s=500.0,
)


def test_when_a_machine_is_there_by_hand():
    trace = SpotTrace([(2, 2), (1, 1), (0, 3), (2, 1)], 10.0)
    assert trace.share == pytest.approx((4 + 1 + 2) / 7 / 2)
    assert list(islice(trace.spans(0, 0), 2)) == [(0.0, 30.0), (60.0, 100.0)], "the trace is repeated"
    assert next(trace.spans(1, 1)) == (0.0, 10.0)
    assert next(trace.spans(0, 3)) == (30.0, 70.0)


def test_a_worker_that_goes_with_its_machine_by_hand():
    """It is there for 10 s of the 10 + 3 that the unit takes, then from 60 s on, and ready 20 s later."""
    trace = SpotTrace([(1, 1), (0, 5), (1, 30)], 10.0)
    play = TracedPlay(WORK, trace, 0, math.inf, random.Random(0))
    found = play.run()
    assert found.seconds == 60 + 20 + 3 + 10 + 4
    assert (found.again, found.workers_lost) == (1.0, 1)
    assert play.rented_hours(found.seconds) * 3600 == 10 + (found.seconds - 60)


def test_two_machines_with_two_outages_by_hand():
    """The first machine goes at 30 s and is back at 60, the second one goes at 10 s and is back at 100. A
    machine keeps its number when it has sampled a unit: neither is there in the other's outage."""
    trace = SpotTrace([(2, 1), (1, 2), (0, 3), (1, 4), (2, 30)], 10.0)
    work = replace(WORK, workers=2, units=(6.0,) * 5, switch_s=0.0)
    play = TracedPlay(work, trace, 0, math.inf, random.Random(0))
    found = play.run()
    assert sorted(play.rented) == [(0.0, 10.0), (0.0, 30.0), (60.0, 430.0), (100.0, 410.0)]
    # two are there after 6 s; the third is lost with the second machine, and free when the first is away
    assert found.seconds == 60 + 20 + 3 * 6 + 4
    assert (found.again, found.workers_lost) == (1 / 5, 2)
    assert play.rented_hours(found.seconds) * 3600 == pytest.approx(30 + 10 + 42 + 2)
    assert play.rented_hours(found.seconds, 50.0) * 3600 == pytest.approx(84 + 2 * 50), (
        "the start is paid too"
    )


def test_a_worker_that_stays_is_paid_for_to_the_end():
    trace = SpotTrace([(0, 5), (1, 1)], 10.0)
    play = TracedPlay(WORK, trace, 0, math.inf, random.Random(0), steady=1)
    found = play.run()
    assert found.seconds == 3 + 10 + 4 and play.rented_hours(found.seconds) * 3600 == found.seconds


def test_the_recorded_runs_and_the_page_are_those_of_the_program():
    recorded = json.loads((fleet_simulation.HERE / "trace_simulation.json").read_text())
    assert recorded == trace_simulation.measure(), "python -m benchmarks.trace_simulation writes them anew"
    assert trace_simulation.table(recorded) in plan_tables.DOCS.read_text()
