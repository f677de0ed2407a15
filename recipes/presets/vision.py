"""GRPO of Qwen2.5-VL, Qwen3-VL and Qwen3.5 on MathV60K, Geometry3K and generated problems, on one GPU to four
nodes."""

from __future__ import annotations

from dataclasses import replace

from recipes.presets import expectations
from recipes.presets.parts import (
    CLUSTERS,
    DATASETS,
    IMAGE_TOKEN,
    VISION_MODELS,
    cloud_run,
    prepare_step,
    with_parts,
)
from recipes.recipe.spec import Budget, Recipe

SHAPES = {
    "0.8b": ("1x1", {"prompts_per_step": 32, "samples_per_prompt": 8, "max_tokens": 2048}, 1, 1e-6, 48),
    "2b": ("1x1", {"prompts_per_step": 32, "samples_per_prompt": 8, "max_tokens": 2048}, 1, 1e-6, 96),
    "3b": ("1x1", {"prompts_per_step": 32, "samples_per_prompt": 8, "max_tokens": 2048}, 1, 1e-6, 120),
    "4b": ("1x8", {"prompts_per_step": 64, "samples_per_prompt": 8, "max_tokens": 2048}, 1, 1e-6, 48),
    "7b": ("1x8", {"prompts_per_step": 64, "samples_per_prompt": 8, "max_tokens": 2048}, 2, 1e-6, 48),
    "8b": ("1x8", {"prompts_per_step": 64, "samples_per_prompt": 8, "max_tokens": 2048}, 2, 1e-6, 48),
    "9b": ("1x8", {"prompts_per_step": 64, "samples_per_prompt": 8, "max_tokens": 2048}, 2, 1e-6, 48),
    "27b": ("2x8", {"prompts_per_step": 64, "samples_per_prompt": 4, "max_tokens": 4096}, 4, 5e-7, 96),
    "30b-a3b": ("2x8", {"prompts_per_step": 64, "samples_per_prompt": 4, "max_tokens": 4096}, 4, 5e-7, 96),
    "32b": ("2x8", {"prompts_per_step": 64, "samples_per_prompt": 4, "max_tokens": 4096}, 4, 5e-7, 96),
    "35b-a3b": ("2x8", {"prompts_per_step": 64, "samples_per_prompt": 4, "max_tokens": 4096}, 4, 5e-7, 96),
    "72b": ("4x8", {"prompts_per_step": 64, "samples_per_prompt": 4, "max_tokens": 8000}, 8, 5e-7, 72),
}
"""Size: cluster, rollout, tensor-parallel ranks of an engine, learning rate, hours allowed: nine in ten runs
end within them on every target."""


def image_limits(family: str) -> dict[str, int]:
    """Options that let an image have 4 to 1,280 tokens."""
    token = IMAGE_TOKEN[family]
    return {"min_pixels": 4 * token, "max_pixels": 1280 * token}


def _grpo(size: str, dataset: str, family: str = "qwen2.5-vl") -> Recipe:
    cluster, rollout, tensor_parallel, rate, hours = SHAPES[size]
    name = f"grpo-{family}-{size}-{dataset}"
    model = VISION_MODELS[family][size]
    config = with_parts(
        cloud_run(name, model, dataset),
        model=image_limits(family),
        rollout=rollout | {"tensor_parallel": tensor_parallel},
        # What would plan more than 90% of a card otherwise: one GPU holds all optimizer states, a GPU of 72B
        # many weights, of which no more may wait than a block and a little of the next.
        optimizer={
            "learning_rate": rate,
            "grad_accum_dtype": "bf16" if cluster == "1x1" or size == "72b" else "fp32",
        }
        | ({"live_parameters": 900_000_000} if size == "72b" else {}),
        evaluation={"every_steps": 50, "max_samples": 256, "split": DATASETS[dataset].held_out},
    )
    if dataset == "mathv60k":
        config = replace(config, expected=expectations.MATHV60K)
    shape = CLUSTERS[cluster]
    gpus = f"{shape.nodes} x {shape.gpus_per_node}" if shape.gpus_per_node > 1 else "one GPU"
    return Recipe(
        name=name,
        description=f"GRPO of {model.partition('/')[2].removesuffix('-Instruct')} on {dataset} ({gpus})",
        config=config,
        cluster=shape,
        dataset=DATASETS[dataset],
        steps=(prepare_step(dataset),),
        budget=Budget(max_hours=hours),
    )


def qwen2_5_vl_3b_mathv60k() -> Recipe:
    """One 80 GB GPU."""
    return _grpo("3b", "mathv60k")


def qwen2_5_vl_7b_mathv60k() -> Recipe:
    """One node of 8."""
    return _grpo("7b", "mathv60k")


def qwen2_5_vl_32b_mathv60k() -> Recipe:
    """Two nodes of 8."""
    return _grpo("32b", "mathv60k")


def qwen2_5_vl_72b_mathv60k() -> Recipe:
    """Four nodes of 8, with the options of the original OpenRLHF-M run but two.

    Its --save_steps 50 saves nothing before the end of a run of 31 steps, so the interval is Young and Daly's
    here. Its --train_batch_size 64 leaves two samples to each of 32 ranks, which wait for the longest of
    them: here an update takes the whole rollout.
    """
    recipe = _grpo("72b", "mathv60k")
    config = with_parts(
        recipe.config,
        data={"max_samples": 1000, "episodes": 2, "prompt_max_tokens": 4096},
        algorithm={"normalize_reward": True, "kl_coef": 1e-3},
    )
    return replace(recipe, config=config)


def qwen2_5_vl_72b_mathv60k_original() -> Recipe:
    """The same with the original's four updates of 64 samples."""
    recipe = qwen2_5_vl_72b_mathv60k()
    name = f"{recipe.name}-orig"
    config = with_parts(recipe.config, run={"name": name}, algorithm={"samples_per_update": 64})
    description = recipe.description.replace(" (", ", the original's updates of 64 (")
    return replace(recipe, name=name, description=description, config=config)


def _lora(recipe: Recipe, cluster: str, rank: int) -> Recipe:
    """The recipe with adapters on fewer GPUs, at ten times the learning rate: docs/lora.md."""
    name, shape = recipe.name.replace("-mathv60k", "-lora-mathv60k"), CLUSTERS[cluster]
    config = with_parts(
        recipe.config,
        run={"name": name},
        lora={"rank": rank},
        # An adapter's gradients are small in any type.
        optimizer={
            # Ten times 1e-6 is 9.999999999999999e-06 in binary.
            "learning_rate": round(10 * recipe.config.optimizer.learning_rate, 12),
            "grad_accum_dtype": "fp32",
        },
    )
    trained = recipe.description.partition(" (")[0]
    description = f"{trained}, LoRA of rank {rank} ({shape.nodes} x {shape.gpus_per_node})"
    return replace(recipe, name=name, description=description, config=config, cluster=shape)


def qwen2_5_vl_7b_lora_mathv60k() -> Recipe:
    """Half a node."""
    return _lora(qwen2_5_vl_7b_mathv60k(), "1x4", 16)


def qwen2_5_vl_72b_lora_mathv60k() -> Recipe:
    """One node of 8, which full training does not fit."""
    return _lora(qwen2_5_vl_72b_mathv60k(), "1x8", 16)


def qwen2_5_vl_32b_geometry3k() -> Recipe:
    """Two nodes of 8."""
    return _grpo("32b", "geometry3k")


def qwen2_5_vl_72b_geometry3k() -> Recipe:
    """Four nodes of 8."""
    return _grpo("72b", "geometry3k")


def qwen2_5_vl_3b_generated() -> Recipe:
    """One 80 GB GPU; the data is drawn on the machine, so that nothing but the model is downloaded."""
    return _grpo("3b", "generated")


def qwen2_5_vl_7b_generated() -> Recipe:
    """One node of 8."""
    return _grpo("7b", "generated")


def qwen2_5_vl_7b_zoom() -> Recipe:
    """One node of 8: a picture of 1,600 x 1,200 is seen in 256 tokens, in which its details cannot be read,
    and so is each part that the model asks for."""
    recipe = _grpo("7b", "details")
    seen = 256 * IMAGE_TOKEN["qwen2.5-vl"]
    name = "grpo-qwen2.5-vl-7b-zoom"
    config = with_parts(
        recipe.config,
        run={"name": name},
        model={"max_pixels": seen},
        data={"prompt_max_tokens": 1024, "episodes": 2},
        turns={"environment": "zoom", "limit": 4, "image_pixels": seen},
    )
    description = recipe.description.replace(" on details", " with the tool zoom on small details")
    return replace(recipe, name=name, description=description, config=config)


def qwen3_vl_2b_mathv60k() -> Recipe:
    """One 80 GB GPU."""
    return _grpo("2b", "mathv60k", "qwen3-vl")


def qwen3_vl_4b_mathv60k() -> Recipe:
    """One node of 8."""
    return _grpo("4b", "mathv60k", "qwen3-vl")


def qwen3_vl_8b_mathv60k() -> Recipe:
    """One node of 8."""
    return _grpo("8b", "mathv60k", "qwen3-vl")


def qwen3_vl_32b_mathv60k() -> Recipe:
    """Two nodes of 8."""
    return _grpo("32b", "mathv60k", "qwen3-vl")


def qwen3_vl_30b_a3b_mathv60k() -> Recipe:
    """Two nodes of 8."""
    return _grpo("30b-a3b", "mathv60k", "qwen3-vl")


def qwen3_5_0_8b_mathv60k() -> Recipe:
    """One 80 GB GPU."""
    return _grpo("0.8b", "mathv60k", "qwen3.5")


def qwen3_5_4b_mathv60k() -> Recipe:
    """One node of 8."""
    return _grpo("4b", "mathv60k", "qwen3.5")


def qwen3_5_9b_mathv60k() -> Recipe:
    """One node of 8."""
    return _grpo("9b", "mathv60k", "qwen3.5")


def qwen3_5_27b_mathv60k() -> Recipe:
    """Two nodes of 8."""
    return _grpo("27b", "mathv60k", "qwen3.5")


def qwen3_5_35b_a3b_mathv60k() -> Recipe:
    """Two nodes of 8."""
    return _grpo("35b-a3b", "mathv60k", "qwen3.5")
