"""The host's part of a pass: what was measured, and what the plan makes of it."""

import json
from pathlib import Path

import pytest

from benchmarks import host_time
from recipes.plan import memory, passes, step_seconds
from recipes.presets import RECIPES, get
from recipes.recipe.spec import override

DOCS = Path(__file__).parents[2] / "docs/planned.md"
RECIPE = "grpo-qwen2.5-vl-3b-mathv60k"
OLD_ROW_S = 1.82
"""Host seconds of a row of 3B with hooks at every module, on the device that computes nothing."""
H100_STEP_S, H100_LEARNING_S = 67.8, 51.9


def test_with_the_host_time_of_the_code_that_ran_the_plan_is_what_an_h100_took(monkeypatch):
    recipe = override(get(RECIPE), ["algorithm.micro_batch_tokens=6144"])
    need = memory.plan_memory(recipe, "H100")
    assert need is not None
    block = OLD_ROW_S / 3 / passes.count_blocks(need.shape)
    with monkeypatch.context() as then:
        then.setattr(step_seconds, "BLOCK_S", block)
        step = step_seconds.step_time(recipe, "H100", 100.0, need)
    assert step.total == pytest.approx(H100_STEP_S, rel=0.15)
    assert step.update + step.logprobs == pytest.approx(H100_LEARNING_S, rel=0.15)
    quicker = step_seconds.step_time(recipe, "H100", 100.0, need)
    assert quicker.total < 0.6 * H100_STEP_S


def test_a_pass_takes_the_longest_of_gpu_and_host(monkeypatch):
    recipe = get(RECIPE)
    need = memory.plan_memory(recipe)
    assert need is not None
    idle = step_seconds.step_time(recipe, "H100", 100.0, need)
    monkeypatch.setattr(step_seconds, "BLOCK_S", 0.0)
    assert step_seconds.step_time(recipe, "H100", 100.0, need).update == idle.update, (
        "hidden behind the products"
    )
    monkeypatch.setattr(step_seconds, "BLOCK_S", 1.0)
    rows = len(passes.of_step(memory.with_rows(recipe), need.shape).updates)
    busy = step_seconds.step_time(recipe, "H100", 100.0, need)
    assert busy.update == pytest.approx(rows * 3 * passes.count_blocks(need.shape))


def test_the_host_keeps_up_by_what_was_measured():
    """Against transformers' own passes: learning within 1.5 times, scoring too where nothing is gathered, and
    within twice in shards."""
    found = json.loads(host_time.OUT.read_text())["passes"]
    assert found[f"{RECIPE}, 1"]["score"]["seconds"] < 1.5 * found[f"{RECIPE}, 1"]["plain_score"]["seconds"]
    for name, one in found.items():
        assert one["learn"]["seconds"] < 1.5 * one["plain_learn"]["seconds"], name
        assert one["score"]["seconds"] < 2 * one["plain_score"]["seconds"], name
        assert max(one["learn"]["waits"], one["score"]["waits"]) <= host_time.WAITS, name


def test_it_needs_less_than_half_of_a_pass_by_the_plan_but_in_the_recipes_that_the_page_names(monkeypatch):
    busy = set()
    for name in RECIPES:
        recipe = get(name)
        need = memory.plan_memory(recipe)
        rows = len(passes.of_step(memory.with_rows(recipe), need.shape).updates) if need else 0
        if not rows:
            continue
        assert need is not None
        host = step_seconds.host_seconds(recipe.config, need.shape)
        with monkeypatch.context() as then:
            then.setattr(step_seconds, "BLOCK_S", 0.0)
            alone = step_seconds.step_time(recipe, recipe.cluster.gpu, 100.0, need).update / rows
        if host > alone / 2:
            busy.add(name)
    assert busy == {"grpo-qwen2.5-vl-3b-clevr", "grpo-qwen2.5-vl-3b-counting"}


def test_the_page_shows_what_was_measured():
    assert all(row in DOCS.read_text() for row in host_time.table())
