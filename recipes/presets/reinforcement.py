"""GRPO of Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Qwen2.5 on one GPU to four nodes, and on-policy distillation: a
student learns from a larger model of its family, token by token, and from no reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from recipes.presets.models_and_data import (
    CLUSTERS,
    DATASETS,
    IMAGE_TOKEN,
    MODELS,
    changed,
    cloud_recipe,
    title_of,
    with_parts,
)
from recipes.recipe.spec import Budget, Recipe
from trainer.config import Expected

SHAPES = {
    # cluster, prompts and samples of each, longest completion, ranks of an engine, learning rate, hours
    "0.8b":    ("1x1", 32, 8, 2048, 1, 1e-6, 48),
    "2b":      ("1x1", 32, 8, 2048, 1, 1e-6, 108),
    "3b":      ("1x1", 32, 8, 2048, 1, 1e-6, 144),
    "4b":      ("1x8", 64, 8, 2048, 1, 1e-6, 48),
    "7b":      ("1x8", 64, 8, 2048, 2, 1e-6, 48),
    "8b":      ("1x8", 64, 8, 2048, 2, 1e-6, 54),
    "9b":      ("1x8", 64, 8, 2048, 2, 1e-6, 54),
    "27b":     ("2x8", 64, 4, 4096, 4, 5e-7, 96),
    "30b-a3b": ("2x8", 64, 4, 4096, 4, 5e-7, 96),
    "32b":     ("2x8", 64, 4, 4096, 4, 5e-7, 108),
    "35b-a3b": ("2x8", 64, 4, 4096, 4, 5e-7, 96),
    "72b":     ("4x8", 64, 4, 8000, 8, 5e-7, 72),
}  # fmt: skip
"""By size of the model. Nine in ten runs end within the hours on every target."""
MATHV60K = Expected(
    not_promised=(
        "a curve: no accuracy before and after GRPO on MathV60K is published. Memory, hours and dollars are"
        " those of the plan"
    )
)


def image_limits(family: str) -> dict[str, int]:
    """Options that let an image have 4 to 1,280 tokens."""
    token = IMAGE_TOKEN[family]
    return {"min_pixels": 4 * token, "max_pixels": 1280 * token}


def _grpo(size: str, dataset: str, family: str = "qwen2.5-vl") -> Recipe:
    machines, prompts, samples, longest, tensor_parallel, rate, hours = SHAPES[size]
    model, shape = MODELS[family][size], CLUSTERS[machines]
    gpus = f"{shape.nodes} x {shape.gpus_per_node}" if shape.gpus_per_node > 1 else "one GPU"
    # What would plan more than 90% of a card otherwise: one GPU holds all optimizer states, a GPU of 72B many
    # weights, of which no more may wait than a block and a little of the next.
    tight = machines == "1x1" or size == "72b"
    optimizer = {"learning_rate": rate, "grad_accum_dtype": "bf16" if tight else "fp32"}
    return cloud_recipe(
        f"grpo-{family}-{size}-{dataset}",
        f"GRPO of {title_of(model)} on {dataset} ({gpus})",
        model,
        dataset,
        shape,
        hours,
        MATHV60K if dataset == "mathv60k" else None,
        model=image_limits(family),
        rollout={
            "prompts_per_step": prompts,
            "samples_per_prompt": samples,
            "max_tokens": longest,
            "tensor_parallel": tensor_parallel,
        },
        optimizer=optimizer | ({"live_parameters": 900_000_000} if size == "72b" else {}),
        evaluation={"every_steps": 50, "max_samples": 256, "split": DATASETS[dataset].held_out},
    )


def _72b_mathv60k() -> Recipe:
    """The options of the original OpenRLHF-M run but two.

    Its --save_steps 50 saves nothing before the end of a run of 31 steps, so the interval is Young and Daly's
    here. Its --train_batch_size 64 leaves two samples to each of 32 ranks, which wait for the longest of
    them: here an update takes the whole rollout.
    """
    recipe = _grpo("72b", "mathv60k")
    data = {"max_samples": 1000, "episodes": 2, "prompt_max_tokens": 4096}
    algorithm = {"normalize_reward": True, "kl_coef": 1e-3}
    return changed(recipe, recipe.name, recipe.description, data=data, algorithm=algorithm)


def _72b_original() -> Recipe:
    """The same with the original's four updates of 64 samples."""
    recipe = _72b_mathv60k()
    description = recipe.description.replace(" (", ", the original's updates of 64 (")
    return changed(recipe, f"{recipe.name}-orig", description, algorithm={"samples_per_update": 64})


def _lora(recipe: Recipe, machines: str, hours: float, rank: int = 16) -> Recipe:
    """The recipe with adapters on fewer GPUs, at ten times the learning rate: docs/lora.md."""
    shape = CLUSTERS[machines]
    trained = recipe.description.partition(" (")[0]
    adapted = changed(
        recipe,
        recipe.name.replace("-mathv60k", "-lora-mathv60k"),
        f"{trained}, LoRA of rank {rank} ({shape.nodes} x {shape.gpus_per_node})",
        lora={"rank": rank},
        optimizer={
            # Ten times 1e-6 is 9.999999999999999e-06 in binary.
            "learning_rate": round(10 * recipe.config.optimizer.learning_rate, 12),
            "grad_accum_dtype": "fp32",  # an adapter's gradients are small in any type
        },
    )
    return replace(adapted, cluster=shape, budget=Budget(max_hours=hours))


def _zoom() -> Recipe:
    """A picture of 1,600 x 1,200 is seen in 256 tokens, in which its details cannot be read, and so is each
    part that the model asks for."""
    recipe = _grpo("7b", "details")
    seen = 256 * IMAGE_TOKEN["qwen2.5-vl"]
    return changed(
        recipe,
        "grpo-qwen2.5-vl-7b-zoom",
        recipe.description.replace(" on details", " with the tool zoom on small details"),
        model={"max_pixels": seen},
        data={"prompt_max_tokens": 1024, "episodes": 2},
        turns={"environment": "zoom", "limit": 4, "image_pixels": seen},
    )


def _text(size: str, machines: str, prompts: int, tensor_parallel: int) -> Recipe:
    """GSM8K: the smallest real run, and the common example of other stacks."""
    return cloud_recipe(
        f"grpo-qwen2.5-{size}-gsm8k",
        f"GRPO of Qwen2.5-{size.upper()} on GSM8K",
        MODELS["qwen2.5"][size],
        "gsm8k",
        CLUSTERS[machines],
        24,
        data={"episodes": 15, "prompt_max_tokens": 512},
        rollout={
            "prompts_per_step": prompts,
            "max_tokens": 1024,
            "samples_per_prompt": 5,
            "tensor_parallel": tensor_parallel,
        },
        algorithm={"samples_per_update": prompts * 5 // 4},
        optimizer={"learning_rate": 1e-6},
        evaluation={"every_steps": 20},
        # On one GPU with 0.5B the longest rows fit without computing anything twice.
        model={"gradient_checkpointing": size != "0.5b"},
    )


def _distilled(family: str, size: str, teacher: str, dataset: str, samples: int, hours: int) -> Recipe:
    """One node of 8. The teacher lies in shards beside the student, as a reference would."""
    models = MODELS[family]
    return cloud_recipe(
        f"opd-{family}-{size}-from-{teacher}-{dataset}",
        f"On-policy distillation of {title_of(models[size])} from {teacher.upper()} on {dataset} (1 x 8)",
        models[size],
        dataset,
        replace(CLUSTERS["1x8"], gpu="H100", alternatives=("A100-80GB",)),
        hours,
        model=image_limits(family),
        rollout={"samples_per_prompt": samples, "max_tokens": 2048, "tensor_parallel": 2},
        algorithm={"teacher": models[teacher], "kl_coef": 0.0},
        optimizer={"learning_rate": 1e-6},
        rewards={"accuracy_weight": 0.0, "format_weight": 0.0},
        evaluation={"every_steps": 10, "max_samples": 256, "split": DATASETS[dataset].held_out},
    )


def _distilled_geometry3k() -> Recipe:
    """Batch, completions and learning rate of verl's example of the same pair, in 15 passes over the rows."""
    recipe = _distilled("qwen3-vl", "8b", "32b", "geometry3k", 1, 24)
    parts = {"data": {"episodes": 15}, "rollout": {"prompts_per_step": 128}}
    return replace(recipe, config=with_parts(recipe.config, **parts))


def _distilled_mathv60k() -> Recipe:
    """The shortest way from a 72B to a 7B. Groups of four, so that the teacher reads a prompt once for all of
    them."""
    recipe = _distilled("qwen2.5-vl", "7b", "72b", "mathv60k", 4, 48)
    parts = {"run": {"max_steps": 300}, "rollout": {"prompts_per_step": 64}}
    return replace(recipe, config=with_parts(recipe.config, **parts))


def _sizes(family: str, dataset: str, *sizes: str) -> dict[str, Callable[[], Recipe]]:
    """A recipe for each size of a family on a dataset."""
    return {f"grpo-{family}-{size}-{dataset}": partial(_grpo, size, dataset, family) for size in sizes}


RECIPES: dict[str, Callable[[], Recipe]] = {
    **_sizes("qwen2.5-vl", "mathv60k", "3b", "7b", "32b"),
    "grpo-qwen2.5-vl-72b-mathv60k": _72b_mathv60k,
    "grpo-qwen2.5-vl-72b-mathv60k-orig": _72b_original,
    "grpo-qwen2.5-vl-7b-lora-mathv60k": lambda: _lora(_grpo("7b", "mathv60k"), "1x4", 60),
    "grpo-qwen2.5-vl-72b-lora-mathv60k": lambda: _lora(_72b_mathv60k(), "1x8", 72),
    **_sizes("qwen2.5-vl", "geometry3k", "32b", "72b"),
    **_sizes("qwen2.5-vl", "generated", "3b", "7b"),
    "grpo-qwen2.5-vl-7b-zoom": _zoom,
    **_sizes("qwen3-vl", "mathv60k", "2b", "4b", "8b", "30b-a3b", "32b"),
    **_sizes("qwen3.5", "mathv60k", "0.8b", "4b", "9b", "27b", "35b-a3b"),
    "opd-qwen3-vl-8b-from-32b-geometry3k": _distilled_geometry3k,
    "opd-qwen2.5-vl-7b-from-72b-mathv60k": _distilled_mathv60k,
    "grpo-qwen2.5-0.5b-gsm8k": partial(_text, "0.5b", "1x1", prompts=256, tensor_parallel=1),
    "grpo-qwen2.5-7b-gsm8k": partial(_text, "7b", "1x8", prompts=1024, tensor_parallel=2),
}
