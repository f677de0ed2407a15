"""The plan beside what recipes allocated on a device that computes nothing."""

from __future__ import annotations

import json

from benchmarks.allocated import planned_now, table
from recipes.plan import memory
from recipes.plan.allocated import PATH, absent, allocated_by_phase, beside
from recipes.presets import get, resolve
from recipes.recipe.resolved import GIB
from tests.conftest import ROOT

CLOSE = 0.15
"""Share of the plan by which tensors of a phase that does not decide may exceed it."""


def test_the_plan_covers_what_tensors_took():
    recipes = json.loads(PATH.read_text())
    assert recipes
    for recipe in recipes:
        plan = planned_now(get(recipe))
        found = allocated_by_phase(recipe)
        assert found.keys() == plan.keys()
        decides = max(plan, key=lambda phase: plan[phase])
        assert found[decides].tensors < 1.02 * plan[decides], recipe
        for phase, one in found.items():
            assert one.tensors < (1 + CLOSE) * plan[phase], (recipe, phase)


def test_the_page_has_the_figures():
    assert "\n".join(table()) in (ROOT / "docs/planned.md").read_text()


def test_a_recipe_that_was_not_run_has_no_figures():
    assert allocated_by_phase("sft-qwen2.5-7b-lora") == {}


def test_figures_stand_beside_the_plan_that_they_are_of():
    name = "grpo-qwen2.5-vl-7b-mathv60k"
    need = memory.plan_memory(get(name))
    assert need
    found = beside(name, need)
    for phase in need.phases:
        if phase.name in ("load", "rollout", "logprobs"):
            more = absent(phase.parts) / GIB
            assert (
                more > 2 and found[phase.name].tensors == allocated_by_phase(name)[phase.name].tensors + more
            )
    other = memory.plan_memory(resolve(name, ["algorithm.micro_batch_tokens=12288"]))
    assert other and beside(name, other) == {}


def test_nothing_is_beside_a_plan_without_one_of_the_phases():
    name = "grpo-qwen2.5-vl-3b-mathv60k"
    alone = memory.plan_memory(resolve(name, ["fleet.workers=only"]))
    assert "rollout" not in [phase.name for phase in alone.phases] and beside(name, alone) == {}
