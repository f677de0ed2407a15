import json
from dataclasses import replace

import pytest

from tests.families import FAMILIES, VISION, loader
from trainer.hardware import flops, gpus
from trainer.hardware.flops import CompletedSequence
from trainer.hardware.layer_sizes import Experts
from trainer.hardware.model_shapes import Shape, Vision, from_config, shape_of

TINY = Shape(layers=2, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4, vocabulary=32)
SEEING = Shape(
    layers=2,
    hidden=8,
    intermediate=16,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocabulary=32,
    vision=Vision(depth=3, hidden=4, intermediate=6, patch=14, window=112, full=1),
)
QWEN_72B = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3456,
        "num_heads": 16,
        "out_hidden_size": 8192,
        "in_chans": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}


def test_a_tiny_model_by_hand():
    # q 8x8, k and v 8x4 each, o 8x8, MLP 3 x 8x16: 64 + 64 + 64 + 384 = 576 multiply-adds
    assert flops.layer_flops_per_token(TINY) == 1152
    # 3 tokens see 1 + 2 + 3 keys; 4 FLOPs x 2 layers x 8 wide
    assert flops.attention_flops(TINY, 1, 3) == 4 * 2 * 8 * 6
    assert flops.attention_flops(TINY, 3, 2) == 0
    assert flops.language_flops(TINY, 3) == 3 * 2 * 1152 + 384
    assert flops.head_flops(TINY, 5) == 2 * 8 * 32 * 5


def test_a_tiny_vision_tower_by_hand():
    # one frame of 10 x 4 patches: 40 patches; windows of 8 + 2 rows by 4 columns
    embed = 40 * 2 * (3 * 2 * 14 * 14) * 4
    blocks = 3 * 40 * 2 * (4 * 16 + 3 * 4 * 6)
    full = 1 * 4 * 4 * 40**2
    windows = 2 * 4 * 4 * ((8 * 4) ** 2 + (2 * 4) ** 2)
    merger = 10 * 2 * (16 * 16 + 16 * 8)
    assert flops.vision_flops(SEEING, [(1, 10, 4)]) == embed + blocks + full + windows + merger
    assert flops.vision_flops(SEEING, [(2, 10, 4)]) == 2 * flops.vision_flops(SEEING, [(1, 10, 4)])
    assert flops.vision_flops(TINY, [(1, 10, 4)]) == 0 and flops.vision_flops(SEEING, []) == 0


def test_a_token_meets_the_experts_that_are_chosen_for_it():
    # q, k, v and o as above: 192; a router to 4 experts, of which 2 are 8 wide each: 3 x 8 x 16
    shape = replace(TINY, experts=Experts(count=4, active=2))
    assert flops.layer_flops_per_token(shape) == 2 * (192 + 8 * 4 + 3 * 8 * 16)
    assert shape.rest_sizes == [8 * 4, 4 * 2 * 8 * 8, 4 * 8 * 8, 8, 8]
    active = shape.matmul_parameters - TINY.matmul_parameters
    assert active == shape.layers * 8 * 4, "the router, and as many weights as a plain MLP of that width"
    assert shape.parameters - TINY.parameters == shape.layers * (8 * 4 + 3 * 8 * 8 * (4 - 2))
    # one more that computes every token, 4 wide: 3 x 4 x 8, and its gate
    shared = replace(shape, intermediate=shape.intermediate + 4, experts=Experts(count=4, active=2, shared=4))
    more = flops.layer_flops_per_token(shared) - flops.layer_flops_per_token(shape)
    assert more == 2 * (3 * 4 * shape.hidden + shape.hidden)
    assert shared.matmul_parameters - shape.matmul_parameters == shape.layers * more // 2
    # a second token chooses each of the 2 idle experts with probability one half
    assert shape.read_parameters(1) == shape.matmul_parameters
    assert shape.read_parameters(2) == shape.matmul_parameters + shape.layers * 3 * 8 * 8 * 2 * 0.5
    assert TINY.read_parameters(7) == TINY.matmul_parameters


def test_prefill_and_decode_together_are_one_forward_pass_less_the_logits_that_nobody_reads():
    for prompt, answer in ((5, 1), (5, 7), (1, 3)):
        generated = flops.prefill_flops(TINY, prompt) + flops.decode_flops(TINY, prompt, answer)
        forward = flops.language_flops(TINY, prompt + answer - 1) + flops.head_flops(TINY, answer)
        assert generated == forward
    assert flops.decode_flops(TINY, 5, 0) == flops.decode_flops(TINY, 5, 1) == 0


def test_a_group_reads_its_prompt_once_where_prefixes_are_cached():
    group = [
        CompletedSequence(5, 3, ((1, 8, 8),), 0),
        CompletedSequence(5, 3, ((1, 8, 8),), 0),
        CompletedSequence(4, 2, (), 1),
    ]
    once, every = (flops.rollout_flops(SEEING, group, shared) for shared in (True, False))
    assert every - once == flops.prefill_flops(SEEING, 5, [(1, 8, 8)])


def test_training_is_three_forward_passes_and_checkpointing_runs_the_blocks_once_more():
    q = CompletedSequence(5, 3, ((1, 8, 8),))
    tower = flops.vision_flops(SEEING, q.grids)
    layers = flops.language_flops(SEEING, 8)
    head = flops.head_flops(SEEING, 3)
    assert flops.logprob_flops(SEEING, [q]) == tower + layers + head
    plain = flops.train_flops(SEEING, [q, q], recompute=False, freeze_vision=False)
    assert plain.model == plain.hardware == 2 * 3 * (tower + layers + head)
    again = flops.train_flops(SEEING, [q], recompute=True, freeze_vision=False)
    assert again.hardware - again.model == tower + layers
    adapted = flops.train_flops(SEEING, [q], recompute=False, freeze_vision=True, adapters=True)
    frozen_base = flops.train_flops(SEEING, [q], recompute=False, freeze_vision=True)
    linear = q.prompt + q.completion, SEEING.layers * flops.layer_flops_per_token(SEEING)
    assert frozen_base.model - adapted.model == linear[0] * linear[1] + flops.head_flops(SEEING, q.completion)
    frozen = flops.train_flops(SEEING, [q], recompute=True, freeze_vision=True)
    assert frozen.model == tower + 3 * (layers + head) and frozen.hardware - frozen.model == layers


def test_the_72b_model_has_the_published_size():
    shape = from_config(QWEN_72B)
    weights = (shape.layers * flops.layer_flops_per_token(shape) + flops.head_flops(shape, 1)) // 2
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 29568
    # 72.7e9 less the embedding, biases and norms
    assert weights == 80 * layer + 8192 * 152064 == 71_458_357_248
    # 6 x weights per trained token, and 6 x layers x width x length / 2 x 2 for causal attention over a long
    # sequence
    length = 4096
    work = (
        flops.train_flops(shape, [CompletedSequence(0, length)], recompute=False, freeze_vision=False).model
        / length
    )
    assert work == pytest.approx(4.288e11 + 3.93e6 * length, rel=1e-3)


def test_shapes_are_read_from_both_layouts_of_the_configuration(tmp_path):
    nested = {
        "text_config": {k: v for k, v in QWEN_72B.items() if k != "vision_config"},
        "vision_config": QWEN_72B["vision_config"],
    }
    assert from_config(nested) == from_config(QWEN_72B)
    (tmp_path / "config.json").write_text(json.dumps(QWEN_72B))
    assert shape_of(str(tmp_path)) == from_config(QWEN_72B)
    assert from_config(nested["text_config"]).vision is None and from_config(QWEN_72B).head_dim == 128


def built(family):
    """(transformers' model of a few layers, its shape)."""
    from examples.demo import tiny_model

    sizes = tiny_model.TinyShape(128, 96, 3, 4, 2, 32, 48, 4, False)
    config = tiny_model.build_config(sizes, tiny_model.build_tokenizer(), family)
    config._attn_implementation = config._experts_implementation = "eager"
    return loader(family).from_config(config), from_config(config.to_dict())


@pytest.mark.parametrize("grid", [(1, 8, 8), (1, 12, 20), (2, 10, 6)])
@pytest.mark.parametrize("family", VISION)
def test_the_counts_of_a_tower_are_those_of_the_real_one(family, grid):
    """PyTorch's own counter over a forward pass of transformers' model."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model, shape = built(family)
    patches = grid[0] * grid[1] * grid[2]
    v = shape.vision
    assert v and v.full == (1 if family == "qwen2_5_vl" else 4)
    assert v.deepstack == (2 if family.startswith("qwen3_vl") else 0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model.visual(torch.zeros(patches, 3 * 2 * v.patch**2), grid_thw=torch.tensor([grid]))
    assert counter.get_total_flops() == pytest.approx(flops.vision_flops(shape, [grid]), rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_counts_of_a_text_are_those_of_the_real_model(family):
    """The same without an image."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model, shape = built(family)
    tokens = 11
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.ones(1, tokens, dtype=torch.long))
    # eager attention computes the masked half too
    square = 4 * shape.attention_layers * shape.heads * shape.head_dim * tokens**2
    expected = flops.language_flops(shape, tokens) - flops.attention_flops(shape, 1, tokens) + square
    expected += flops.head_flops(shape, tokens) + (chunked(shape, tokens) if shape.delta else 0)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)


def chunked(shape: Shape, tokens: int) -> int:
    """What transformers' loop over chunks does more than the recurrence that is counted: products within the
    padded chunk, in place of a token's with the state, and the convolution's over its padding. PyTorch's
    counter leaves triangular systems out."""
    assert (d := shape.delta)
    chunk = -(-tokens // 64) * 64
    within = d.value_heads * 2 * chunk * 64 * (2 * d.key_dim + d.value_dim)
    states = d.value_heads * 2 * chunk * 3 * d.key_dim * d.value_dim
    recurrence = tokens * d.value_heads * 2 * 3 * d.key_dim * d.value_dim
    padding = 2 * d.channels * d.kernel * (d.kernel - 1)
    return d.layers * (within + states - recurrence + padding)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307),
        ("Tesla V100", None),
        ("NVIDIA GeForce RTX 9999", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_peaks_by_name(name, tera):
    assert gpus.peak_flops(name) == (tera and pytest.approx(tera * 1e12))


def test_an_unknown_gpu_has_no_utilisation_rather_than_a_wrong_one():
    assert flops.utilisation(1e15, 2.0, 4, 1e14) == 1.25
    assert flops.utilisation(1e15, 2.0, 4, None) is None and flops.utilisation(1e15, 0.0, 4, 1e14) is None
    times = {"time/rollout_s": 1.0, "time/update_s": 2.0}
    assert flops.step_metrics(TINY, [CompletedSequence(5, 3)], times, 1, None) == {}


def test_the_metrics_of_a_step():
    sequences = [CompletedSequence(5, 3, ((1, 8, 8),), g) for g in (0, 0, 1, 1)]
    times = {"time/rollout_s": 4.0, "time/update_s": 2.0}
    found = flops.step_metrics(SEEING, sequences, times, 2, 1e6, epochs=2, reference=True, old_logprobs=True)
    train = flops.train_flops(SEEING, sequences, True, False)
    forward = flops.logprob_flops(SEEING, sequences)
    assert found["perf/mfu_rollout"] == flops.rollout_flops(SEEING, sequences, True) / 8e6
    assert found["perf/mfu_train"] == (2 * train.model + 3 * forward) / 4e6
    assert found["perf/hfu_train"] == (2 * train.hardware + 3 * forward) / 4e6


def test_pictures_are_found_in_the_tokens_of_a_prompt():
    assert flops.image_grids([1, 9, 9, 9, 9, 2, 3, 9, 9, 9, 9, 9, 9], 9) == ((1, 4, 4), (1, 4, 6))
    assert flops.image_grids([1, 2], 9) == () and flops.image_grids([9] * 7, 9) == ((1, 2, 14),)
    true, guess = (1, 46, 34), flops.image_grids([9] * (23 * 17), 9)[0]
    shape = from_config(QWEN_72B)
    assert flops.vision_flops(shape, [guess]) == pytest.approx(flops.vision_flops(shape, [true]), rel=0.01)
