"""Workers and trainer that are taken away, played: without losses the plan's own step, by hand where one is
lost."""

import json
import math
import random
from dataclasses import replace

import pytest

from benchmarks import fleet_simulation, plan_tables
from benchmarks.fleet_simulation import FleetWork, LivingWorker, Play
from recipes.plan import fleet_cost

WORK = FleetWork(
    steps=200,
    units=(10.0, 12.0),
    ahead=2,
    update_s=4.0,
    switch_s=3.0,
    workers=2,
    save_steps=20,
    worker_back_s=480.0,
    trainer_back_s=500.0,
)


def played(work, life_s=math.inf, trainer_s=math.inf, seed=0):
    return Play(work, life_s, trainer_s, random.Random(seed)).run()


def test_without_losses_a_step_takes_what_the_plan_says():
    found = played(WORK)
    step = fleet_cost.played_step(WORK.units, 2, 2, 4.0, 3.0)
    assert found.seconds / WORK.steps == pytest.approx(step, rel=0.02)
    assert (found.again, found.workers_lost, found.trainers_lost) == (0.0, 0, 0)


def test_a_lost_worker_costs_its_unit_by_hand():
    """One step of one unit. The first worker goes after 5 of 10 s; 30 s later the second one has the unit."""
    one = Play(replace(WORK, steps=1, units=(10.0,)), math.inf, math.inf, random.Random(0))
    one.machines = [LivingWorker(0.0, 0, 5.0), LivingWorker(1.0, 0, math.inf)]
    found = one.run()
    assert found.seconds == 5 + 30 + 10 + 4
    assert (found.again, found.workers_lost) == (1.0, 1)


def test_a_lost_trainer_learns_again_from_the_log_by_hand():
    """Two steps at once ahead; the trainer goes 1 s into the second update, with no checkpoint before."""
    one = Play(
        replace(WORK, steps=2, ahead=2, units=(10.0,), workers=2), math.inf, math.inf, random.Random(0)
    )
    one.trainer_dies = 10 + 4 + 1.0
    found = one.run()
    assert found.seconds == 15 + 500 + 4 + 4  # back, the first step out of the log, the second
    assert (found.again, found.trainers_lost) == (0.0, 1)


def test_a_step_that_was_not_whole_is_sampled_again_by_hand():
    one = Play(replace(WORK, steps=1, units=(10.0,), workers=1), math.inf, math.inf, random.Random(0))
    one.trainer_dies = 6.0
    found = one.run()
    assert found.seconds == 6 + 500 + 10 + 4 and found.again == 1.0


def test_shorter_lives_cost_more_and_one_more_worker_makes_up_for_them():
    def mean(work, life_s):
        runs = [played(work, life_s, seed=seed) for seed in range(10)]
        return sum(run.seconds for run in runs) / 10, sum(run.again for run in runs) / 10

    work = replace(WORK, ahead=8, update_s=16.0)  # two workers just suffice
    few = [mean(work, life_s) for life_s in (math.inf, 3600.0, 900.0)]
    assert few[0][0] < few[1][0] < few[2][0] and few[0][1] == 0 < few[1][1] < few[2][1]
    more = [mean(replace(work, workers=3), life_s)[0] for life_s in (math.inf, 3600.0)]
    assert more[1] / more[0] - 1 < (few[1][0] / few[0][0] - 1) / 2


def test_the_recorded_runs_and_the_page_are_those_of_the_program():
    recorded = json.loads((fleet_simulation.HERE / "fleet_simulation.json").read_text())
    assert recorded == fleet_simulation.measure(), "python -m benchmarks.fleet_simulation writes them anew"
    assert fleet_simulation.table(recorded) in plan_tables.DOCS.read_text()
