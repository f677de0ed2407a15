"""The plan beside what recipes allocated on a device that computes nothing."""

from __future__ import annotations

import json

from benchmarks.allocated import OUT, allocated_by_phase, planned_now, table
from recipes.presets import get
from tests.conftest import ROOT

CLOSE = 0.15
"""Share of the plan by which tensors of a phase that does not decide may exceed it."""


def test_the_plan_covers_what_tensors_took():
    recipes = json.loads(OUT.read_text())
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
