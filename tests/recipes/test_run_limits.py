"""`budget.max_hours` beside the hours that a run is likely to take."""

from __future__ import annotations

import json
import math

import pytest
from desk import bare_desk, run

from recipes.plan import choice, cost, offer_choice, prices, resolving
from recipes.presets import RECIPES, get
from recipes.screens import recipe_list

SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"
THREE = "grpo-qwen2.5-vl-3b-mathv60k"
TRAINED = [name for name in RECIPES if get(name).kind == "train" and get(name).cluster.gpus_per_node]


@pytest.fixture(autouse=True)
def desk(monkeypatch, tmp_path):
    bare_desk(monkeypatch, tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", TRAINED)
def test_nine_in_ten_runs_end_within_their_limit_wherever_up_may_rent(name):
    recipe = get(name)
    by_machine = {}
    for offer in cost.offers(recipe, ranges=True):
        if offer.usd is not None:
            by_machine[offer.gpu, offer.spot, offer.step.total] = offer
    assert by_machine
    for offer in by_machine.values():
        judged = offer_choice.judge_offer(offer, math.inf, math.inf)
        assert judged.hours <= recipe.budget.max_hours, (offer.target, offer.gpu)


def test_the_first_line_says_that_a_run_is_likely_to_be_ended(capsys):
    _, out, _ = run(capsys, "plan", THREE, "--set", "budget.max_hours=24")
    first = out.splitlines()[0]
    assert (
        first == "fits, but skypilot-runpod likely takes 62 h, and budget.max_hours ends it for good at 24 h"
    )
    assert "--set budget.max_hours=107" in out, "which nine in ten runs keep"
    _, out, _ = run(capsys, "plan", THREE)
    assert "ends it" not in out


def test_a_limit_that_one_run_in_ten_would_meet_is_a_remark(capsys):
    _, out, _ = run(capsys, "plan", THREE, "--set", "budget.max_hours=80")
    assert out.startswith(
        "fits with 7.9 GiB to spare; skypilot-runpod, A100-80GB on demand: 62 h (30-107), $86 (42-148)"
    )
    assert "budget.max_hours ends it at 80 h; nine in ten such runs end within 107" in out


# --- One choice at one price ----------------------------------------------------------------------


def put(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def taken(capsys):
    """The target that `plan` marks, and its likely hours and dollars."""
    facts = json.loads(run(capsys, "plan", SEVEN, "--json")[1])
    offer = facts["taken"]
    return offer["target"], offer["hours_50"], offer["usd_50"], facts["why"]


def test_list_plan_and_up_take_one_offer_at_one_price(capsys, desk):
    target, hours, usd, _ = taken(capsys)
    (row,) = [one for one in recipe_list.planned_recipes() if one.name == SEVEN]
    assert (row.hours, row.usd) == (hours, usd)
    assert choice.cheapest_target(get(SEVEN)) == target
    plan = resolving.expect_run(resolving.resolve_target(get(SEVEN), target), prices.sky_catalogs())
    assert (plan.planned_hours, plan.planned_usd) == (hours, usd)
    assert plan.planned_most_hours > hours


def test_what_a_launch_needs_is_looked_at(capsys, desk):
    target, _, cheapest, why = taken(capsys)
    assert (target, why) == (
        "skypilot-runpod",
        "the cheapest; first it needs sky and a key in ~/.runpod/config.toml",
    )
    put(desk / "bin/sky")
    assert taken(capsys)[3] == "the cheapest; first it needs a key in ~/.runpod/config.toml"
    put(desk / ".config/gcloud/application_default_credentials.json")
    target, _, usd, why = taken(capsys)
    assert (target, why) == ("skypilot-gcp", "the cheapest that can be driven from here") and usd > cheapest
    put(desk / ".runpod/config.toml")
    assert taken(capsys)[:3:2] == ("skypilot-runpod", cheapest)


def test_the_kept_list_is_made_anew_when_a_key_comes(desk):
    before = recipe_list.desk_state()
    put(desk / ".runpod/config.toml")
    assert recipe_list.desk_state() != before
