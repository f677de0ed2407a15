"""The plan of runs whose own nodes sample on some of their GPUs: `fleet.gpus_per_node`."""

from __future__ import annotations

import shlex

import pytest

from recipes.drivers import fleet_launch, launch_checks
from recipes.plan import fleet_cost, memory, prices
from recipes.presets import resolve
from recipes.recipe.resolved import GIB
from recipes.recipe.spec import Recipe
from recipes.records.run_record import RunRecord
from recipes.screens import fleet_words
from trainer.config import ConfigError

NAME = "grpo-qwen2.5-vl-7b-mathv60k"
SPLIT = ["fleet.workers=only", "fleet.gpus_per_node=4", "rollout.tensor_parallel=1", "rollout.staleness=2"]


def own_rows(recipe: Recipe) -> list[fleet_cost.FleetRow]:
    return fleet_cost.own_rows(recipe, prices.sky_catalogs(), ["skypilot-aws"])


def test_a_part_of_the_same_machines_samples_and_they_cost_what_they_cost():
    recipe = resolve(NAME, [])
    rows = own_rows(recipe)
    assert {row.worker.own for row in rows if row.worker} == {2, 4}, "where 6 sample, 2 lack room to learn"
    for row in rows:
        assert row.worker and row.worker.usd_per_hour == 0 and row.gpus + row.worker.own == 8
        assert row.usd_per_hour == row.offer.usd_per_hour and row.count == row.worker.own


def test_its_machine_reads_patches_out_of_the_store_like_any_other():
    aws, runpod = (
        fleet_cost.own_rows(resolve(NAME, []), prices.sky_catalogs(), [target])[0]
        for target in ("skypilot-aws", "skypilot-runpod")
    )
    assert aws.egress_usd == 0 < runpod.egress_usd, "S3 is counted until a bucket is named"


def test_the_options_of_a_row_are_those_of_a_recipe_with_that_plan():
    recipe = resolve(NAME, [])
    found = fleet_cost.compare_fleets(recipe, prices.sky_catalogs(), ["skypilot-aws"])
    best = min((row for row in found.fleets if row.worker and row.worker.own), key=lambda row: row.usd)
    words = shlex.split(fleet_words.row_options(recipe, best))
    assert "--fleet" not in words
    chosen = resolve(NAME, [words[i + 1] for i, word in enumerate(words) if word == "--set"])
    assert chosen.config.placement.workers_per_node == best.gpus
    again = fleet_cost.own_plan(chosen, prices.sky_catalogs(), ["skypilot-aws"])
    assert (
        again and again.step_s == pytest.approx(best.step_s) and again.run_usd == pytest.approx(best.run_usd)
    )
    line = fleet_words.own_nodes(chosen, again)
    assert f"{best.worker.own} of each node's 8 GPUs" in line and f"{again.step_s:.1f} s" in line


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


def test_smaller_engines_are_proposed_only_where_the_node_has_ram_for_their_copies():
    """Four engines of 72B on a node would hold four copies of its weights there."""
    recipe = resolve("grpo-qwen2.5-vl-72b-mathv60k", ["optimizer.offload_optimizer=true"])
    found = {row.worker.gpus for row in own_rows(recipe) if row.worker and row.worker.own == 4}
    assert found == {4}


def test_a_node_s_workers_begin_with_the_whole_model():
    """Ranks of several nodes share its download; workers of each node read all of it."""
    alone = ["cluster.nodes=2", "checkpoint.export_hf=never"]
    shared, whole = (memory.plan_memory(resolve(NAME, sets)) for sets in (alone, [*alone, *SPLIT]))
    assert shared and whole
    assert shared.disk["model download"] < whole.disk["model download"] == 2.0 * whole.shape.parameters


def test_with_machines_elsewhere_besides_no_plan_of_both_is_claimed():
    recipe = resolve(NAME, [*fleet_launch.fleet_overrides("2xL40S"), *SPLIT])
    record = RunRecord(run_id="mine", recipe=NAME, target="skypilot-aws", usd_per_hour=10.0)
    lines, row = fleet_words.describe_both_groups(recipe, record, record)
    assert row is None and "sample too" in lines[-1]


def test_a_recipe_with_machines_elsewhere_has_no_rows_of_its_own_nodes():
    recipe = resolve(
        NAME, ["sample.gpu=L40S", "sample.nodes=2", "fleet.workers=only", "rollout.tensor_parallel=1"]
    )
    assert own_rows(recipe) == []
