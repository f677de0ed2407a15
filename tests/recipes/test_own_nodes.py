"""The plan of runs whose own nodes sample on some of their GPUs: `fleet.gpus_per_node`."""

from __future__ import annotations

import shlex

import pytest

from recipes import fleet_table
from recipes.plan import fleet_cost, memory, prices
from recipes.presets import resolve
from recipes.spec import Recipe

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
    found = fleet_cost.compare(recipe, prices.sky_catalogs(), ["skypilot-aws"])
    best = min((row for row in found.fleets if row.worker and row.worker.own), key=lambda row: row.usd)
    words = shlex.split(fleet_table.options(recipe, best))
    assert "--fleet" not in words
    chosen = resolve(NAME, [words[i + 1] for i, word in enumerate(words) if word == "--set"])
    assert chosen.config.placement.workers_per_node == best.gpus
    again = fleet_cost.own_plan(chosen, prices.sky_catalogs(), ["skypilot-aws"])
    assert (
        again and again.step_s == pytest.approx(best.step_s) and again.run_usd == pytest.approx(best.run_usd)
    )
    line = fleet_table.own_nodes(chosen, again)
    assert f"{best.worker.own} of each node's 8 GPUs" in line and f"{again.step_s:.1f} s" in line


def test_the_other_gpus_hold_no_engine_and_the_node_each_worker_s_weights():
    need = memory.plan(resolve(NAME, SPLIT))
    assert need and "rollout" not in {phase.name for phase in need.phases}
    assert need.host["each worker's copy of the weights"] == 4 * 2.0 * need.shape.parameters


def test_a_recipe_with_machines_elsewhere_has_no_rows_of_its_own_nodes():
    recipe = resolve(
        NAME, ["sample.gpu=L40S", "sample.nodes=2", "fleet.workers=only", "rollout.tensor_parallel=1"]
    )
    assert own_rows(recipe) == []
