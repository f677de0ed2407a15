"""The plan of runs whose own nodes sample on some of their GPUs: `fleet.gpus_per_node`."""

from __future__ import annotations

import pytest

from recipes.drivers import fleet_launch, launch_checks
from recipes.plan import fleet_cost, memory, prices, resolving
from recipes.presets import resolve
from recipes.recipe.resolved import GIB
from recipes.records.run_record import RunRecord
from recipes.screens import fleet_screen
from trainer.config import ConfigError

NAME = "grpo-qwen2.5-vl-7b-mathv60k"
SPLIT = ["fleet.workers=only", "fleet.gpus_per_node=4", "rollout.tensor_parallel=1", "rollout.staleness=2"]


def test_no_time_is_planned_of_nodes_that_sample_too():
    recipe = resolve(NAME, SPLIT)
    run = resolving.resolve_target(recipe, "skypilot-aws")
    expected = resolving.expect_run(run, prices.sky_catalogs())
    assert expected.usd_per_hour > 0 == expected.planned_usd == expected.planned_hours
    assert "no time is planned" in fleet_cost.fleet_refusal(recipe)


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
        launch_checks.check_launch(resolving.resolve_target(small, "slurm"), reproducible=False)
    of_four = memory.plan_memory(resolve(name, [*lean, "rollout.tensor_parallel=4"]))
    assert of_four and of_four.fits, of_four
    assert of_four.kv_cache_tokens > 400_000
    (sync,) = (phase for phase in of_four.phases if phase.name == "own workers' sync")
    assert sync.parts["bucket and its copy"] > 4 * GIB


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
    assert row is None and "no time is planned" in lines[-1]
