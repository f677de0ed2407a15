"""On-policy distillation: a student learns from a larger model of its family, token by token, and from no
reward."""

from __future__ import annotations

from dataclasses import replace

from recipes.presets.parts import CLUSTERS, DATASETS, VISION_MODELS, cloud_run, prepare_step, with_parts
from recipes.presets.vision import image_limits
from recipes.recipe.spec import Budget, Recipe


def _opd(family: str, size: str, teacher: str, dataset: str, rollout: dict[str, int], hours: int) -> Recipe:
    """One node of 8. The teacher lies in shards beside the student, as a reference would."""
    name = f"opd-{family}-{size}-from-{teacher}-{dataset}"
    models = VISION_MODELS[family]
    config = with_parts(
        cloud_run(name, models[size], dataset),
        model=image_limits(family),
        rollout=rollout | {"max_tokens": 2048, "tensor_parallel": 2},
        algorithm={"teacher": models[teacher], "kl_coef": 0.0},
        optimizer={"learning_rate": 1e-6},
        rewards={"accuracy_weight": 0.0, "format_weight": 0.0},
        evaluation={"every_steps": 10, "max_samples": 256, "split": DATASETS[dataset].held_out},
    )
    student = models[size].partition("/")[2].removesuffix("-Instruct")
    return Recipe(
        name=name,
        description=f"On-policy distillation of {student} from {teacher.upper()} on {dataset} (1 x 8)",
        config=config,
        cluster=replace(CLUSTERS["1x8"], gpu="H100", alternatives=("A100-80GB",)),
        dataset=DATASETS[dataset],
        steps=(prepare_step(dataset),),
        budget=Budget(max_hours=hours),
    )


def qwen3_vl_8b_from_32b_geometry3k() -> Recipe:
    """Batch, completions and learning rate of verl's example of the same pair, in 15 passes over the rows."""
    recipe = _opd(
        "qwen3-vl", "8b", "32b", "geometry3k", {"prompts_per_step": 128, "samples_per_prompt": 1}, 24
    )
    return replace(recipe, config=with_parts(recipe.config, data={"episodes": 15}))


def qwen2_5_vl_7b_from_72b_mathv60k() -> Recipe:
    """The shortest way from a 72B to a 7B. Groups of four, so that the teacher reads a prompt once for all of
    them."""
    recipe = _opd(
        "qwen2.5-vl", "7b", "72b", "mathv60k", {"prompts_per_step": 64, "samples_per_prompt": 4}, 48
    )
    return replace(recipe, config=with_parts(recipe.config, run={"max_steps": 300}))
