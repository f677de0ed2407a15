"""ZeRO stages: their bytes and seconds by hand, and what fits."""

import pytest

from recipes.plan import cost, memory, sizing, step_seconds
from recipes.presets import RECIPES, get
from recipes.recipe.spec import override
from trainer.config import LoRA, Optimizer, RunConfig
from trainer.hardware.model_shapes import KNOWN

GIB = 2**30
SHAPE = KNOWN["Qwen/Qwen2.5-14B-Instruct"]
FULL = "sft-qwen2.5-14b-full"


def at(stage, costs=(1000.0, 1000.0), gather=2.0, lora=0, host=0.4):
    config = RunConfig(method="sft", optimizer=Optimizer(zero_stage=stage), lora=LoRA(rank=lora))
    return step_seconds.update_seconds(config, SHAPE, costs, 1e-3, gather, gather, host)


def test_seconds_by_hand():
    """Two passes of 4 s of products (layers are computed again), a gather of 2 s."""
    assert at(1) == at(2) == pytest.approx(4 + 4 + 2), "collectives beside the products, then a gather"
    assert at(3) > 2 * (2.0 + 2.0), "forward, most of backward, and gradients"
    assert at(1, host=5.0) == pytest.approx(10 + 2), "a pass takes the longest of the three"
    assert at(2, gather=10.0) == pytest.approx(2 * 20 + 10), "all-reduced, twice a gather, in both passes"
    assert at(1, gather=10.0) == pytest.approx(4 + 20 + 10), "and at stage 1 in the last"


def test_adapters_send_next_to_nothing_below_stage_3():
    """Their passes take three quarters, since most weights need no gradients."""
    assert at(2, gather=10.0, lora=16) < 6.2 < 30 < at(3, gather=10.0, lora=16)


def test_memory_of_each_stage_by_hand():
    p, ranks = SHAPE.parameters, 8
    parts = {}
    for stage in (1, 2, 3):
        need = memory.plan_memory(override(get(FULL), [f"optimizer.zero_stage={stage}"]))
        assert need is not None
        parts[stage] = next(phase.parts for phase in need.phases if phase.name == "optimizer step")
        assert parts[stage]["fp32 master"] + parts[stage]["Adam moments"] == pytest.approx(12 * p / ranks)
    assert parts[1]["policy, whole"] == parts[2]["policy, whole"] == 2 * p
    assert parts[3]["policy shard"] == 2 * p / ranks
    assert parts[2]["gradients"] == parts[3]["gradients"] == 4 * p / ranks
    assert parts[1]["gradients"] == 4 * p + 4 * p / ranks


def test_what_does_not_fit_whole_is_sharded():
    recipe = override(get(FULL), ["optimizer.zero_stage=1"])
    need = memory.plan_memory(recipe)
    assert need is not None and not need.fits
    assert sizing.cheapest_fix(recipe) == ["optimizer.zero_stage=3"]


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("sft-")])
def test_sft_recipes_are_planned_as_such(name):
    recipe = get(name)
    need = memory.plan_memory(recipe)
    assert need is not None and need.fits
    assert {phase.name for phase in need.phases}.isdisjoint({"rollout", "sync"})
    step = step_seconds.step_time(recipe, recipe.cluster.gpu, 400.0, need)
    assert step.rollout == step.logprobs == step.sync == 0 < step.update
    rows = recipe.dataset.rows * recipe.config.sft.epochs
    assert cost.steps_of(recipe) == rows // recipe.config.sft.batch_size
