"""The plan of 4-bit fine-tuning beside what Qwen has published of its first models: one A100, batches of 8
passes of one row (README of QwenLM/Qwen, Profiling of Memory and Speed)."""

from dataclasses import replace

import pytest

from recipes.plan import cost, memory, spread, step_seconds
from recipes.plan.step_seconds import token_seconds
from recipes.presets import get
from trainer.config import LoRA, Model, Optimizer, RunConfig
from trainer.hardware.gpus import gpu_named
from trainer.hardware.model_shapes import Shape

SHAPES = {
    "7B": Shape(hidden=4096, layers=32, heads=32, kv_heads=32, intermediate=11008, vocabulary=151936),
    "14B": Shape(hidden=5120, layers=40, heads=40, kv_heads=40, intermediate=13696, vocabulary=152064),
    "72B": Shape(hidden=8192, layers=80, heads=64, kv_heads=64, intermediate=24576, vocabulary=152064),
}
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
SECONDS = {
    "7B": (3.0, 3.0, 3.5, 7.0, 11.6, 22.3),
    "14B": (5.3, 6.3, 8.2, 11.8, 20.1, 38.3),
    "72B": (27.4, 31.5, 41.4, 59.5, 97.7, 179.8),
}
"""Seconds of a step with Q-LoRA, by length."""
ONE_CARD = (1.2, 1.5, 2.8, 5.2, 10.1, 21.3)
"""Seconds of a step of 7B with LoRA, by length."""
TWO_SERVERS = (2.09, 3.16, 5.17, 9.25, 18.1, 37.4)
"""The same on two servers of two cards each, the same rows for each card."""
CELLS = [(size, *cell) for size, row in SECONDS.items() for cell in zip(LENGTHS, row, strict=True)]


def planned(size, length, qlora):
    shape, card = SHAPES[size], gpu_named("A100-80GB")
    config = RunConfig(
        method="sft",
        lora=LoRA(rank=64, qlora=qlora),
        model=Model(gradient_checkpointing=True),
        optimizer=Optimizer(zero_stage=2),
    )
    unpack = step_seconds.unpack_seconds(config, shape, card)
    host = step_seconds.host_seconds(config, shape)
    return step_seconds.update_seconds(
        config, shape, [float(length)] * 8, token_seconds(shape, card), 0.0, 0.0, host, unpack
    )


@pytest.mark.parametrize(("size", "length", "seconds"), CELLS)
def test_4_bit_steps_are_about_as_long_as_published(size, length, seconds):
    assert 0.6 < planned(size, length, True) / seconds < 1.5


def test_lora_steps_lie_within_the_range_that_a_plan_shows_on_two_servers_too():
    """On two servers all lengths take as much longer, so it is not the adapter's gradients on their way: the
    plan has one factor for it."""
    for length, one, two in zip(LENGTHS, ONE_CARD, TWO_SERVERS, strict=True):
        plan = planned("7B", length, False)
        assert spread.STEP[0] < one / plan < 1.45
        assert spread.STEP[0] < two / (plan * spread.SEVERAL_NODES) < spread.SEVERAL_NODES_STEP[1]
        assert 1.7 < two / one < 2.2


def test_a_second_node_costs_supervised_training_that_factor_and_rl_nothing():
    two = get("sft-qwen2.5-72b-full")
    one = replace(two, cluster=replace(two.cluster, nodes=1))
    need = memory.plan_memory(two, "H100")
    steps = [step_seconds.step_time(recipe, "H100", 1e9, need).update for recipe in (one, two)]
    assert steps[1] == pytest.approx(spread.SEVERAL_NODES * steps[0], rel=1e-3)


def test_the_range_of_several_nodes_is_that_of_supervised_training():
    wide = spread.step_bounds(vision=False, several_nodes=True)
    assert wide == spread.step_bounds(vision=True, several_nodes=True) == spread.SEVERAL_NODES_STEP
    assert spread.step_bounds(vision=True, several_nodes=False) == spread.VISION_STEP
    for name, several in (("sft-qwen2.5-72b-full", True), ("sft-qwen2.5-14b-full", False)):
        (offer, *_) = cost.offers(get(name))
        assert offer.several_nodes == several
    (offer, *_) = cost.offers(get("grpo-qwen2.5-vl-72b-mathv60k"))
    assert offer.nodes > 1 and offer.step_bounds == spread.VISION_STEP


def test_at_short_rows_unpacking_is_most_of_a_step():
    assert planned("7B", 256, True) > 2 * planned("7B", 256, False)
    assert planned("7B", 8192, True) < 1.2 * planned("7B", 8192, False)
