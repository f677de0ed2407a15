"""Tables of docs/planned.md: every recipe's seconds beside their roofline, and host memory by its shards."""

from __future__ import annotations

import pytest

from benchmarks import plan_tables
from benchmarks.plan_tables import FAR, PHASES, compared, power_of_two, staged, trainings
from recipes.plan import cost, memory

RENEW = ".venvs/test/bin/python -m benchmarks.plan_tables"
"""Writes the tables anew."""
RECIPES = {recipe.name: recipe for recipe in trainings()}


@pytest.mark.parametrize("name", RECIPES)
def test_no_phase_is_planned_below_its_roofline_and_far_ones_have_a_reason(name):
    one = compared(RECIPES[name])
    for phase in PHASES:
        plan, roof = getattr(one.plan, phase), getattr(one.roof, phase)
        assert plan >= 0.98 * roof, phase
        assert (plan > FAR * roof) == (phase in one.reasons), phase
    assert cost.ENGINE_STEP_S > 0, "the plan's constants are back"


@pytest.mark.parametrize("name", RECIPES)
def test_staging_by_shards_is_what_is_planned(name):
    """Adapters too. As powers of two, whole models would take up to twice as much."""
    recipe = RECIPES[name]
    need = memory.plan_memory(recipe)
    assert need is not None
    planned = need.host["checkpoint being written"]
    assert staged(recipe) == pytest.approx(planned, rel=0.001)
    assert planned <= staged(recipe, power_of_two) < 2.01 * planned


@pytest.mark.parametrize("table", [plan_tables.times, plan_tables.hosts])
def test_the_page_shows_what_the_plan_says_now(table):
    lines = set(plan_tables.DOCS.read_text().splitlines())
    missing = [row for row in table().splitlines() if row not in lines]
    if missing:
        names = ", ".join(row.split(" | ")[0].strip("| ") for row in missing)
        pytest.fail(f"docs/planned.md is older than the plan: `{RENEW}` (rows: {names})", pytrace=False)
