"""A recipe that is resolved once on its target has what render, prices and launch ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from recipes.plan import cost, memory
from recipes.plan.resolving import resolve_target
from recipes.platforms.targets import targets_for
from recipes.presets import get, resolve
from tests.recipes.rendered import render
from trainer.config import ConfigError

SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"
BIG = "grpo-qwen2.5-vl-72b-mathv60k"


@pytest.mark.parametrize("name", [SEVEN, BIG, "sft-qwen2.5-7b-lora", "preflight", "serve", "demo"])
def test_what_is_resolved_is_what_each_would_find_again(name):
    recipe = get(name)
    for target in targets_for(recipe):
        run = resolve_target(recipe, target)
        saving = run.recipe.config.checkpoint  # whole checkpoints take more of a node's disk
        recipe = replace(get(name), config=replace(get(name).config, checkpoint=saving))
        assert run.recipe.cluster == memory.with_resources(recipe).cluster and run.target == target
        assert run.recipe.config.algorithm == memory.with_rows(recipe).config.algorithm
        assert run.memory == memory.plan_memory(recipe) and run.groups == (run,)
        assert memory.with_resources(run.recipe) == run.recipe, "nothing is left to resolve"


@pytest.mark.parametrize("name", [SEVEN, BIG, "preflight", "serve"])
def test_machines_stand_in_the_order_in_which_a_task_file_tries_them(name):
    recipe = get(name)
    for target in [one for one in targets_for(recipe) if one.startswith("skypilot")]:
        resources = yaml.safe_load(next(iter(render(recipe, target).values())))["resources"]
        places = resources.get("ordered", [resources])
        machines = resolve_target(recipe, target).machines
        clouds = [one["infra"].partition("/")[0].replace("k8s", "kubernetes") for one in places]
        assert [one.target.partition("-")[2] for one in machines] == clouds
        assert [one.spot for one in machines] == [one.get("use_spot", False) for one in places]


def test_a_machine_has_the_dollars_that_its_offer_has():
    run = resolve_target(get(SEVEN), "skypilot")
    offers = {(one.target, one.gpu, one.spot): one.usd for one in cost.offers(get(SEVEN))}
    assert run.machines and all(one.usd == offers[one.target, one.gpu, one.spot] for one in run.machines)
    dollars = [one.usd for one in run.machines]
    assert dollars == sorted(dollars)


def test_both_groups_are_resolved_each_on_its_own_target():
    sets = ["sample.nodes=2", "sample.gpu=L40S", "sample.target=skypilot-gcp", "fleet.workers=only"]
    run = resolve_target(
        resolve(SEVEN, [*sets, "sample.gpu=L4", "sample.gpus_per_node=4"]), "skypilot-runpod"
    )
    assert run.sampling and [one.target for one in run.groups] == ["skypilot-runpod", "skypilot-gcp"]
    assert run.sampling.recipe.kind == "sample" and run.sampling.memory.gpu == "L4"
    assert {one.gpu for one in run.sampling.machines} == {"L4"}


def test_what_a_target_cannot_run_is_refused_once():
    with pytest.raises(ConfigError, match="runs one node.*use"):
        resolve_target(get(BIG), "skypilot-runpod")
    with pytest.raises(ConfigError, match="unknown target"):
        resolve_target(get(SEVEN), "nowhere")
    waiting = resolve(SEVEN, ["sample.nodes=2", "sample.gpu=L40S"])
    with pytest.raises(ConfigError, match="would wait for nothing"):
        resolve_target(waiting, "skypilot-runpod")


def test_on_shared_files_several_nodes_save_there():
    assert resolve_target(get(BIG), "slurm").recipe.config.checkpoint.shared_files
    assert not resolve_target(get(BIG), "skypilot-gcp").recipe.config.checkpoint.shared_files
