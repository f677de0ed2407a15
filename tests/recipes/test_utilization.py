"""What the plan says of a mixture of experts' utilization of the GPUs."""

import re

import pytest

from recipes.plan import cost, memory, passes, utilization
from recipes.presets import get
from trainer.hardware.gpus import gpu_named

RECIPE = "grpo-qwen3-vl-30b-a3b-mathv60k"


def test_experts_that_compute_are_counted_and_gathering_all_of_them_is_waited_for():
    recipe = get(RECIPE)
    need = memory.plan_memory(recipe)
    assert need is not None
    updates, whole = utilization.of_update(recipe, need, 100)
    assert 0.001 < whole < updates < 0.4
    faster, _ = utilization.of_update(recipe, need, 1600)
    assert faster > 3 * updates, "between nodes the network is waited for"

    # By hand: 6 FLOPs for each weight that computes a token or a patch, and 2 more for the reference.
    step = passes.of_step(recipe, need.shape)
    tower = need.shape.vision
    assert tower is not None
    patches = sum(length.image_tokens for length in step.lengths) * tower.merge**2
    weights = need.shape.matmul_parameters * step.tokens + tower.parameters(need.shape.hidden) * patches
    flops = (6 + 2 * step.models) * weights
    time = cost.step_time(recipe, need.gpu, 100, need)
    seconds = (time.update + time.logprobs) * recipe.config.placement.world_size
    assert updates == pytest.approx(flops / seconds / gpu_named(need.gpu).bf16_tflops / 1e12, rel=0.15)
    said = utilization.utilization_remark(recipe, need, 100)
    assert f"updates reach {updates:.1%} of the H100s' peak (MFU) at 100 Gb/s" in said
    assert "3.0 of 31.1 billion weights compute a token" in said


def test_a_dense_model_has_no_such_line():
    recipe = get("grpo-qwen2.5-vl-7b-mathv60k")
    need = memory.plan_memory(recipe)
    assert need is not None and utilization.utilization_remark(recipe, need, 100) == ""


def test_the_plan_says_what_a_slow_network_costs_and_where_experts_are_a_loop():
    recipe = get("grpo-qwen2.5-vl-72b-mathv60k")
    need = memory.plan_memory(recipe, "H100")
    assert need is not None
    said = utilization.waiting_remark(recipe, need, 100)
    here, alone = map(int, re.findall(r"(\d+) s", said))
    assert here > 2 * alone and "GPUDirect" in said
    assert utilization.waiting_remark(recipe, need, 3200) == ""

    mixture = get("grpo-qwen3-vl-30b-a3b-mathv60k")
    for gpu, loops in (("A100-80GB", True), ("H100", False)):
        need = memory.plan_memory(mixture, gpu)
        assert (
            need is not None
            and ("one expert after another" in utilization.utilization_remark(mixture, need, 100)) == loops
        )
