"""Bytes and parameters by hand, and the parameter count against real models."""

import dataclasses
from typing import Any

import pytest

from recipes.plan import activations, memory, sizing
from recipes.presets import RECIPES, get
from recipes.recipe.spec import override
from tests.families import FAMILIES, VISION, loader
from tests.rehearsal.models import mlp
from trainer.config import ConfigError, RunConfig
from trainer.config.budget import MOST_TOKENS, longest_sample
from trainer.hardware.model_shapes import KNOWN, Shape, from_config, shape_of

GIB = 2**30


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("Qwen/Qwen2-VL-2B-Instruct", 2_208_985_600),
        ("Qwen/Qwen2-VL-7B-Instruct", 8_291_375_616),
        ("Qwen/Qwen2-VL-72B-Instruct", 73_405_560_320),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3_754_622_976),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656),
        ("Qwen/Qwen2.5-VL-72B-Instruct", 73_410_777_344),
        ("Qwen/Qwen3-VL-2B-Instruct", 2_127_532_032),
        ("Qwen/Qwen3-VL-4B-Instruct", 4_437_815_808),
        ("Qwen/Qwen3-VL-8B-Instruct", 8_767_123_696),
        ("Qwen/Qwen3.5-0.8B", 852_985_920),
        ("Qwen/Qwen3.5-4B", 4_539_265_536),
        ("Qwen/Qwen3.5-9B", 9_409_813_744),
        ("Qwen/Qwen3.5-27B", 27_356_728_560),
        ("Qwen/Qwen3.5-35B-A3B", 35_107_181_936),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", 31_070_754_032),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen/Qwen3-235B-A22B", 235_093_634_560),
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
    ],
)
def test_parameters_of_published_models(model, parameters):
    assert KNOWN[model].parameters == parameters


@pytest.mark.parametrize("name", [name for name, shape in KNOWN.items() if shape.delta])
def test_every_parameter_of_a_published_qwen3_5(name):
    """Against transformers' model of the same sizes; it leaves the published draft layer (mtp) out."""
    import torch
    import transformers

    shape = KNOWN[name]
    assert shape.delta and (v := shape.vision)
    kind = "Moe" if shape.experts else ""
    text = mlp(shape) | {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "linear_num_value_heads": shape.delta.value_heads,
    }
    vision = {
        "hidden_size": v.hidden,
        "intermediate_size": v.intermediate,
        "depth": v.depth,
        "num_heads": v.heads,
        "out_hidden_size": shape.hidden,
    }
    config: Any = getattr(transformers, f"Qwen3_5{kind}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=shape.tied
    )
    with torch.device("meta"):
        built = getattr(transformers, f"Qwen3_5{kind}ForConditionalGeneration")(config)
    assert sorted(shape.sizes()) == sorted(p.numel() for p in built.parameters())
    assert from_config(config.to_dict()) == shape


@pytest.mark.parametrize("name", [name for name, shape in KNOWN.items() if shape.experts and not shape.delta])
def test_every_parameter_of_a_published_mixture_of_experts(name):
    """Against transformers' model of the same sizes."""
    import torch
    import transformers

    shape = KNOWN[name]
    text = mlp(shape) | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
    }
    if v := shape.vision:
        vision = {"out_hidden_size": shape.hidden}
        config: Any = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
        kind: Any = transformers.Qwen3VLMoeForConditionalGeneration
        assert config.vision_config.depth == v.depth
    else:
        config, kind = transformers.Qwen3MoeConfig(**text), transformers.Qwen3MoeForCausalLM
    with torch.device("meta"):
        built = kind(config)
    assert sorted(shape.sizes()) == sorted(p.numel() for p in built.parameters())
    assert from_config(config.to_dict()) == shape


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_a_built_model(family_model, family):
    built = loader(family).from_pretrained(family_model(family))
    shape = shape_of(str(family_model(family)))
    assert shape and sorted(shape.sizes()) == sorted(p.numel() for p in built.parameters())
    if family in VISION:
        tower = sorted(p.numel() for p in built.model.visual.parameters())
        assert shape.vision and sorted(shape.vision.sizes(shape.hidden)) == tower


def test_flops_of_72b_per_token():
    shape = KNOWN["Qwen/Qwen2.5-VL-72B-Instruct"]
    assert 3 * shape.flops_per_token(4096) == pytest.approx(4.29e11 + 3.9e6 * 4096, rel=0.01)


def test_shapes_that_are_not_known_are_refused():
    with pytest.raises(ConfigError, match="download it and set model.path"):
        shape_of("meta/llama")
    assert shape_of("${MODELS}/demo") is None


def test_what_a_hybrid_model_caches_by_hand():
    """Qwen3.5-9B: 8 layers with attention; 24 with a state of 32 heads, 128 x 128 each in fp32, and the last
    three inputs of a convolution over 8,192 channels."""
    shape = KNOWN["Qwen/Qwen3.5-9B"]
    assert shape.kv_bytes_per_token() == 8 * 2 * 4 * 256 * 2
    assert shape.state_bytes() == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    recipe = get("grpo-qwen3.5-9b-mathv60k")
    need, tp = memory.plan_memory(recipe), recipe.config.rollout.tensor_parallel
    assert need and (rollout := next(phase for phase in need.phases if phase.name == "rollout").parts)
    cache = rollout["engine KV cache"] - 3 * GIB
    token = shape.kv_bytes_per_token() / tp + shape.state_bytes() / tp / recipe.config.longest_sequence
    assert need.kv_cache_tokens == pytest.approx(cache / token, rel=1e-6)


def test_72b_on_32_gpus_by_hand():
    need = memory.plan_memory(get("grpo-qwen2.5-vl-72b-mathv60k"))
    assert need
    p = 73_410_777_344
    update = next(phase for phase in need.phases if phase.name == "update").parts
    assert update["policy shard"] == update["reference shard"] == p * 2 / 32  # 4.6 GB each
    assert update["gradients"] == p * 2 / 32, "they add up in bf16: in fp32 more than 90% of a card"
    assert update["fp32 master"] + update["Adam moments"] == p * 12 / 32  # 27.5 GB
    layers = 12_096 * (80 * 8192 + 2 * 128) * 2  # every layer's input; cosines and sines
    merger, own_pixels = 1280 * 8 + 1280 * 4, 1176 * 2
    tower = 5120 * (1176 * 4 + own_pixels + 32 * 1280 * 2 + 2 * 80 * 4 + merger)
    assert update["saved activations"] == layers + tower
    norms = 2 * 8192 * 8
    attention = 2 * 2 * (64 + 8) * 128 + 4 * 64
    mlp = 2 * 4 * 29568
    assert update["layer at work"] == 12_096 * (norms + attention + mlp - 2 * 8192 + 2 * 2 * 29568)
    # a block, and what may wait beside it
    block = 3 * 8192 * 29568 + 2 * 8192 * (8192 + 1024) + 8192 + 2 * 1024 + 2 * 8192
    assert update["gathered layers"] == pytest.approx((9e8 + block) * 2, rel=5e-3)
    assert update["gradients of the block"] == 2 * (3 * 8192 * 29568 + 2 * 8192), "those of its MLP"
    assert update["gradients being reduced"] == block * 2, "the block before"
    assert update["bucket being scattered"] == update["reduce bucket"] == 5e7 * 2
    rollout = next(phase for phase in need.phases if phase.name == "rollout").parts
    assert rollout["engine weights"] == p * 2 / 8  # 18.4 GB
    assert rollout["policy shard"] == p * 2 / 32, "the weight sync gathers it, so it never leaves the GPU"
    assert rollout["engine weights"] + rollout["engine KV cache"] == pytest.approx(0.4 * 79.2 * GIB)
    assert need.checkpoint_bytes == p * 12
    assert need.fits and need.peak.name == "update"
    assert need.kv_cache_tokens == int((0.4 * 79.2 * GIB - p * 2 / 8 - 3 * GIB) / (327_680 / 8))


def test_72b_with_adapters_on_one_node_by_hand():
    recipe = get("grpo-qwen2.5-vl-72b-lora-mathv60k")
    need = memory.plan_memory(recipe)
    assert need and recipe.config.placement.world_size == 8
    p = 73_410_777_344
    h = 8192
    i = 29568
    kv = 1024
    adapter = 16 * 80 * (2 * (h + h) + 2 * (h + kv) + 3 * (h + i))  # q and o, k and v, the MLP's three
    assert need.checkpoint_bytes == 12 * adapter == pytest.approx(2.4 * GIB, rel=0.02)
    update = next(phase for phase in need.phases if phase.name == "update").parts
    assert update["policy shard"] == (p + adapter) * 2 / 8 and "reference shard" not in update
    assert update["fp32 master"] + update["Adam moments"] + update["gradients"] == adapter * 16 / 8
    sync = next(phase for phase in need.phases if phase.name == "sync").parts
    group = h * 152_064 * 2
    assert sync["merging adapters"] == h * i * (4 + 4 + 2) + group, (
        "fp32 of one layer twice, and the merged bucket"
    )
    assert need.fits and max(phase.total for phase in need.phases) < 56 * GIB
    full = memory.plan_memory(override(recipe, ["lora.rank=0"]))
    assert full and not full.fits


def test_every_recipe_fits_every_gpu_it_names():
    for name in RECIPES:
        recipe = get(name)
        for gpu in (recipe.cluster.gpu, *recipe.cluster.alternatives):
            need = memory.plan_memory(recipe, gpu)
            assert need is None or need.fits, f"{name} on {gpu}: {need.problem}"


def test_recipes_for_one_gpu_ask_for_no_more_ram_than_is_rented_with_it():
    """RunPod's smallest machine with an A100-80GB has 117 GiB (SkyPilot's catalog): asking for more finds no
    offer."""
    one = [
        get(name)
        for name in RECIPES
        if get(name).cluster.gpus_per_node == 1 and memory.plan_memory(get(name))
    ]
    assert one
    for recipe in one:
        assert 0 < memory.with_resources(recipe).cluster.memory_gib <= 117, recipe.name


@pytest.mark.parametrize(
    ("name", "overrides", "fix"),
    [
        (
            "grpo-qwen2.5-vl-72b-mathv60k",
            ["model.gradient_checkpointing=false"],
            ["model.gradient_checkpointing=true"],
        ),
        ("grpo-qwen2.5-vl-72b-mathv60k", ["cluster.nodes=1"], ["cluster.nodes=4"]),
        ("grpo-qwen2.5-vl-72b-mathv60k", ["rollout.tensor_parallel=2"], ["rollout.tensor_parallel=8"]),
        ("grpo-qwen2.5-vl-72b-mathv60k", ["optimizer.hpz_ranks=8"], ["optimizer.hpz_ranks=1"]),
        (
            "grpo-qwen2.5-vl-7b-mathv60k",
            ["algorithm.logprob_tokens=600000"],
            ["algorithm.logprob_tokens=4096"],
        ),
        (
            "grpo-qwen2.5-vl-72b-mathv60k",
            ["optimizer.live_parameters=9000000000"],
            ["optimizer.live_parameters=0"],
        ),
        (
            "grpo-qwen2.5-vl-7b-mathv60k",
            ["algorithm.micro_batch_tokens=400000"],
            ["algorithm.micro_batch_tokens=4096"],
        ),
        (
            "grpo-qwen2.5-vl-3b-mathv60k",
            ["optimizer.grad_accum_dtype=fp32", "data.prompt_max_tokens=20000"],
            ["optimizer.offload_reference=true"],
        ),
        (
            "grpo-qwen2.5-vl-3b-mathv60k",
            [
                "optimizer.grad_accum_dtype=fp32",
                "optimizer.offload_reference=true",
                "data.prompt_max_tokens=50000",
            ],
            ["optimizer.grad_accum_dtype=bf16"],
        ),
        ("grpo-qwen2.5-vl-3b-mathv60k", ["cluster.gpu=L40S"], ["optimizer.offload_optimizer=true"]),
    ],
)
def test_cheapest_fix_is_the_cheapest_and_it_fixes(name, overrides, fix):
    recipe = override(get(name), overrides)
    before = memory.plan_memory(recipe)
    assert before and not before.fits and before.problem
    assert sizing.cheapest_fix(recipe) == fix
    after = memory.plan_memory(override(recipe, fix))
    assert after and after.fits


def test_the_longest_completions_that_fit_are_named_where_no_option_helps():
    recipe = override(get("grpo-qwen2.5-vl-7b-mathv60k"), ["rollout.max_tokens=200000"])
    longest = sizing.longest_completions(recipe)
    assert f"--set rollout.max_tokens={longest}, the longest completions that fit" in sizing.advice(recipe)
    for tokens, fits in ((longest, True), (longest + sizing.STEP_TOKENS, False)):
        need = memory.plan_memory(override(recipe, [f"rollout.max_tokens={tokens}"]))
        assert need and need.fits == fits


def test_offloading_moves_bytes_from_the_gpu_to_the_host():
    recipe = get("grpo-qwen2.5-vl-7b-mathv60k")
    kept, away = (
        memory.plan_memory(recipe),
        memory.plan_memory(override(recipe, ["optimizer.offload_reference=true"])),
    )
    assert kept and away
    assert kept.peak.total - away.peak.total >= 0
    assert away.host_bytes - kept.host_bytes == recipe.config.placement.world_size * (8_292_166_656 * 2 / 8)


def test_images_of_later_turns_count_by_the_limits():
    recipe = get("grpo-qwen2.5-vl-7b-zoom")
    vision = KNOWN["Qwen/Qwen2.5-VL-7B-Instruct"].vision
    assert vision is not None
    limited = override(recipe, ["rollout.max_tokens=600"])
    counts = [activations.later_images(one.config, vision) for one in (recipe, limited, get("demo"))]
    assert counts == [3 * 256 * 4, 600 * 4, 0], "three crops of 256 tokens, 4 patches each"
    off = override(recipe, ["turns.environment=off"])
    plans = [memory.plan_memory(one, "A100-80GB").phases for one in (recipe, off)]
    more, less = (phase.total for plan in plans for phase in plan if phase.name == "update")
    assert more - less > 3 * 256 * 4 * 1176 * 4, "at least their pixels"


def test_frozen_vision_has_no_optimizer_states():
    recipe = override(get("grpo-qwen2.5-vl-7b-mathv60k"), ["model.freeze_vision=true"])
    need = memory.plan_memory(recipe)
    tower = KNOWN[recipe.config.model.path].vision
    assert need and tower and need.checkpoint_bytes == 12 * (8_292_166_656 - tower.parameters(3584))


def test_resources_are_asked_for_as_planned():
    recipe = get("grpo-qwen2.5-vl-72b-mathv60k")
    need, asked = memory.plan_memory(recipe), memory.with_resources(recipe).cluster
    assert need
    assert asked.memory_gib * GIB >= need.host_bytes > (asked.memory_gib - 4) * GIB
    assert asked.disk_gib * GIB >= need.disk_bytes and asked.shm_gib == 24
    assert memory.with_resources(override(recipe, ["cluster.memory_gib=7"])).cluster.memory_gib == 7


def test_nodes_that_share_a_download_need_disk_for_their_share():
    big, model = get("grpo-qwen2.5-vl-72b-mathv60k"), 73_410_777_344 * 2

    def download(recipe, *changes):
        return memory.plan_memory(override(recipe, [*changes])).disk["model download"]

    assert download(big) == model / 4 + 5 * GIB, "a quarter of the files, and up to one file more"
    frozen = "model.freeze_vision=true"
    assert download(big, frozen) == model, "the exporting node copies the frozen tower"
    assert download(big, frozen, "checkpoint.export_hf=never") == download(big)
    assert download(big, "storage.volume=cache") == model, "one volume holds all shares"
    assert download(get("grpo-qwen2.5-vl-72b-lora-mathv60k")) == model, "one node"
    assert download(get("grpo-qwen2.5-0.5b-gsm8k"), "cluster.nodes=2") == 494_032_768 * 2, "less than a file"
    full = get("sft-qwen2.5-14b-full")
    assert download(full, "cluster.nodes=2", "optimizer.zero_stage=2") > download(full, "cluster.nodes=2")


def test_remedies_change_only_what_a_configuration_has():
    names = {
        f"{s.name}.{f.name}"
        for s in dataclasses.fields(RunConfig)
        if dataclasses.is_dataclass(s.default_factory)
        for f in dataclasses.fields(s.default_factory)
    } | {"cluster.nodes"}
    assert {key for key, _ in sizing.REMEDIES} <= names


def test_text_only_config():
    config = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
              "intermediate_size": 16, "vocab_size": 32, "tie_word_embeddings": True}  # fmt: skip
    shape = from_config(config)
    assert shape == Shape(
        hidden=8, layers=2, heads=2, kv_heads=1, intermediate=16, vocabulary=32, tied=True, head_dim=4
    )
    layer = (8 * 8 + 8) + 2 * (8 * 4 + 4) + 8 * 8 + 3 * 8 * 16 + 2 * 8
    assert shape.parameters == 32 * 8 + 2 * layer + 8


def test_no_recipe_plans_more_than_nine_tenths_of_a_card():
    """What fragments, and what a newer driver or NCCL takes, has the rest."""
    for name in RECIPES:
        recipe = get(name)
        for gpu in (recipe.cluster.gpu, *recipe.cluster.alternatives):
            need = memory.plan_memory(recipe, gpu) if recipe.cluster.gpus_per_node else None
            if need:
                share = need.peak.total / need.gpu_bytes
                assert share <= memory.MOST_OF_A_CARD, f"{name} on {gpu}: {share:.1%} in {need.peak.name}"


def test_checkpoint_staging_takes_what_is_planned():
    """The buffers of every rank, tensor by tensor as the trainer stages them: fp32 weights and two
    moments."""
    for name in RECIPES:
        recipe = get(name)
        need = memory.plan_memory(recipe) if recipe.cluster.gpus_per_node and recipe.kind == "train" else None
        if not need or recipe.config.lora.rank:
            continue
        world, gpus = recipe.config.placement.world_size, recipe.cluster.gpus_per_node
        trained = need.shape.sizes()
        if recipe.config.model.freeze_vision and need.shape.vision:
            trained = trained[: -len(need.shape.vision.sizes(need.shape.hidden))]
        staged = sum(3 * 4 * -(-elements // world) * gpus for elements in trained)
        planned = need.host["checkpoint being written"]
        assert planned == pytest.approx(staged, rel=0.001), name


def test_rows_are_as_long_as_every_card_has_memory_for():
    for name in RECIPES:
        recipe = get(name)
        rows = memory.with_rows(recipe).config.algorithm.micro_batch_tokens
        if recipe.kind != "train" or not recipe.cluster.gpus_per_node or memory.plan_memory(recipe) is None:
            continue
        assert recipe.config.algorithm.micro_batch_tokens == 0, f"{name}: leave the choice to the plan"
        assert longest_sample(recipe.config) <= rows <= max(MOST_TOKENS["cuda"], rows)
        if rows < MOST_TOKENS["cuda"]:
            longer = override(recipe, [f"algorithm.micro_batch_tokens={rows + memory.ROW_STEP}"])
            cards = (recipe.cluster.gpu, *recipe.cluster.alternatives)
            shares = [
                need.peak.total / need.gpu_bytes
                for card in cards
                if (need := memory.plan_memory(longer, card))
            ]
            assert max(shares) > memory.MOST_OF_A_CARD, name


def test_rows_that_were_asked_for_stay():
    asked = override(get("grpo-qwen2.5-vl-3b-mathv60k"), ["algorithm.micro_batch_tokens=5000"])
    assert memory.with_rows(asked) is asked
    assert memory.with_resources(get(asked.name)).config.algorithm.micro_batch_tokens >= 12_288


def test_nothing_is_computed_twice_where_the_longest_rows_fit_without():
    for name in RECIPES:
        recipe = get(name)
        if recipe.kind != "train" or not recipe.cluster.gpus_per_node or recipe.config.lora.qlora:
            continue
        once = override(recipe, ["model.gradient_checkpointing=false"])
        rows = memory.with_rows(once).config.algorithm.micro_batch_tokens
        need = memory.plan_memory(once)
        if need and rows >= MOST_TOKENS["cuda"] and need.peak.total <= memory.MOST_OF_A_CARD * need.gpu_bytes:
            assert not recipe.config.model.gradient_checkpointing, name


def test_one_rank_gathers_and_reduces_nothing():
    need = memory.plan_memory(get("grpo-qwen2.5-vl-3b-mathv60k"))
    assert need is not None
    for phase in need.phases:
        assert not {"gathered layers", "gather buffer", "reduce bucket", "head"} & phase.parts.keys(), phase
