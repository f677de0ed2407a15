"""The plan of runs whose own nodes sample on some of their GPUs: `fleet.gpus_per_node`."""

from __future__ import annotations

import shlex

import pytest

from recipes.drivers import fleet_launch, launch_checks
from recipes.plan import fleet_cost, memory, prices
from recipes.presets import resolve
from recipes.recipe.resolved import GIB
from recipes.records.run_record import RunRecord
from recipes.screens import fleet_screen, plan_facts
from trainer.config import ConfigError

NAME = "grpo-qwen2.5-vl-7b-mathv60k"
SPLIT = ["fleet.workers=only", "fleet.gpus_per_node=4", "rollout.tensor_parallel=1", "rollout.staleness=2"]


def test_a_part_of_the_same_machines_samples_and_they_cost_what_they_cost(capsys):
    """Patches are read out of the store like any other worker's; the row's options are the recipe's."""
    recipe = resolve(NAME, SPLIT)
    for target, egress in (("skypilot-aws", False), ("skypilot-runpod", True)):
        row = fleet_cost.own_plan(recipe, prices.sky_catalogs(), [target])
        assert row and row.worker and row.worker.usd_per_hour == 0 and row.gpus == row.worker.own == 4
        assert row.usd_per_hour == row.offer.usd_per_hour and row.count == 4
        assert bool(row.egress_usd) is egress, "S3 is counted until a bucket is named"
        words = shlex.split(fleet_screen.row_options(recipe, row))
        assert "--fleet" not in words and {f"fleet.gpus_per_node={4}", SPLIT[2]} <= set(words)
        line = plan_facts.own_nodes(recipe, row)
        assert "4 of each node's 8 GPUs" in line and f"{row.step_s:.1f} s" in line
    compared = fleet_cost.compare_fleets(recipe, prices.sky_catalogs(), ["skypilot-aws"])
    assert compared.colocated and {row.trainer.partition(" x ")[0] for row in compared.fleets} == {"4 of 8"}


def test_the_other_gpus_hold_no_engine_and_the_node_each_worker_s_weights():
    need = memory.plan_memory(resolve(NAME, SPLIT))
    assert need and "rollout" not in {phase.name for phase in need.phases}
    assert need.host["each worker's copy of the weights"] == 4 * 2.0 * need.shape.parameters


def test_an_engine_that_its_gpus_do_not_hold_is_refused_before_anything_is_rented(capsys):
    """The plan knew of the ranks alone: 72B on one GPU of a node was planned, launched, and out of memory."""
    name = "grpo-qwen2.5-vl-72b-mathv60k"
    lean = [*SPLIT, "optimizer.offload_optimizer=true"]
    small = resolve(name, lean)
    need = memory.plan_memory(small)
    assert need and not need.fits and "leaves nothing for the KV cache" in need.problem
    with pytest.raises(ConfigError, match="KV cache"):
        launch_checks.check_launch(small, "slurm", reproducible=False)
    of_four = memory.plan_memory(resolve(name, [*lean, "rollout.tensor_parallel=4"]))
    assert of_four and of_four.fits, of_four
    assert of_four.kv_cache_tokens > 400_000
    (sync,) = (phase for phase in of_four.phases if phase.name == "own workers' sync")
    assert sync.parts["bucket and its copy"] > 4 * GIB


def test_what_is_planned_has_the_engines_and_units_of_the_recipe():
    """Not the smallest engine that would do, nor a unit that happens to be tried."""
    asked = [*SPLIT, "rollout.tensor_parallel=2", "fleet.unit_prompts=10"]
    row = fleet_cost.own_plan(resolve(NAME, asked), prices.sky_catalogs(), ["skypilot-aws"])
    assert row and row.worker
    assert (row.worker.gpus, row.count, row.unit_prompts) == (2, 2, 10)


def test_a_node_s_workers_begin_with_the_whole_model():
    """Ranks of several nodes share its download; workers of each node read all of it."""
    alone = ["cluster.nodes=2", "checkpoint.export_hf=never"]
    shared, whole = (memory.plan_memory(resolve(NAME, sets)) for sets in (alone, [*alone, *SPLIT]))
    assert shared and whole
    assert shared.disk["model download"] < whole.disk["model download"] == 2.0 * whole.shape.parameters


def test_with_machines_elsewhere_besides_no_plan_of_both_is_claimed():
    recipe = resolve(NAME, [*fleet_launch.fleet_overrides("2xL40S"), *SPLIT])
    record = RunRecord(run_id="mine", recipe=NAME, target="skypilot-aws", usd_per_hour=10.0)
    lines, row = fleet_screen.describe_both_groups(recipe, record, record)
    assert row is None and "sample too" in lines[-1]
