"""The recipes: small functions that return one. `RECIPES` maps each name to its function.

Lives here: a file for each family of recipes, the parts that they share, and what a recipe becomes with
data of your own.
In: a name and overrides. Out: a validated `Recipe`.
May import: `recipes.recipe` and the trainer's configuration.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

from recipes.presets import (
    demo,
    distillation,
    expectations,
    gpu_check,
    gsm8k,
    headings,
    own_data,
    preflight,
    published,
    serving,
    sft,
    vision,
)
from recipes.recipe import recipe_files, sample_group
from recipes.recipe.spec import Recipe, override, validate, with_placement
from trainer.config import ConfigError
from trainer.config.bucket_address import BucketAddress
from trainer.hardware import model_shapes

RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo": demo.demo,
    "demo-sft-lora": demo.sft_lora,
    "demo-pretrained": demo.pretrained,
    "demo-pretrained-sft-lora": demo.pretrained_sft_lora,
    "grpo-qwen2.5-vl-3b-mathv60k": vision.qwen2_5_vl_3b_mathv60k,
    "grpo-qwen2.5-vl-7b-mathv60k": vision.qwen2_5_vl_7b_mathv60k,
    "grpo-qwen2.5-vl-32b-mathv60k": vision.qwen2_5_vl_32b_mathv60k,
    "grpo-qwen2.5-vl-72b-mathv60k": vision.qwen2_5_vl_72b_mathv60k,
    "grpo-qwen2.5-vl-72b-mathv60k-orig": vision.qwen2_5_vl_72b_mathv60k_original,
    "grpo-qwen2.5-vl-7b-lora-mathv60k": vision.qwen2_5_vl_7b_lora_mathv60k,
    "grpo-qwen2.5-vl-72b-lora-mathv60k": vision.qwen2_5_vl_72b_lora_mathv60k,
    "grpo-qwen2.5-vl-3b-geometry3k": published.qwen2_5_vl_3b_geometry3k,
    "grpo-qwen2.5-vl-7b-geometry3k": published.qwen2_5_vl_7b_geometry3k,
    "grpo-qwen2.5-vl-32b-geometry3k": vision.qwen2_5_vl_32b_geometry3k,
    "grpo-qwen2.5-vl-72b-geometry3k": vision.qwen2_5_vl_72b_geometry3k,
    "grpo-qwen2.5-vl-7b-mmk12": published.qwen2_5_vl_7b_mmk12,
    "grpo-qwen2.5-vl-3b-clevr": published.qwen2_5_vl_3b_clevr,
    "grpo-qwen2.5-vl-3b-counting": published.qwen2_5_vl_3b_counting,
    "grpo-qwen2.5-vl-3b-generated": vision.qwen2_5_vl_3b_generated,
    "grpo-qwen2.5-vl-7b-generated": vision.qwen2_5_vl_7b_generated,
    "grpo-qwen2.5-vl-7b-zoom": vision.qwen2_5_vl_7b_zoom,
    "grpo-qwen3-vl-2b-mathv60k": vision.qwen3_vl_2b_mathv60k,
    "grpo-qwen3-vl-4b-mathv60k": vision.qwen3_vl_4b_mathv60k,
    "grpo-qwen3-vl-8b-mathv60k": vision.qwen3_vl_8b_mathv60k,
    "grpo-qwen3-vl-30b-a3b-mathv60k": vision.qwen3_vl_30b_a3b_mathv60k,
    "grpo-qwen3-vl-32b-mathv60k": vision.qwen3_vl_32b_mathv60k,
    "grpo-qwen3.5-0.8b-mathv60k": vision.qwen3_5_0_8b_mathv60k,
    "grpo-qwen3.5-4b-mathv60k": vision.qwen3_5_4b_mathv60k,
    "grpo-qwen3.5-9b-mathv60k": vision.qwen3_5_9b_mathv60k,
    "grpo-qwen3.5-27b-mathv60k": vision.qwen3_5_27b_mathv60k,
    "grpo-qwen3.5-35b-a3b-mathv60k": vision.qwen3_5_35b_a3b_mathv60k,
    "opd-qwen3-vl-8b-from-32b-geometry3k": distillation.qwen3_vl_8b_from_32b_geometry3k,
    "opd-qwen2.5-vl-7b-from-72b-mathv60k": distillation.qwen2_5_vl_7b_from_72b_mathv60k,
    "grpo-qwen2.5-0.5b-gsm8k": gsm8k.qwen2_5_0_5b_gsm8k,
    "grpo-qwen2.5-7b-gsm8k": gsm8k.qwen2_5_7b_gsm8k,
    "sft-qwen2.5-7b-lora": sft.qwen2_5_7b_lora,
    "sft-qwen2.5-14b-full": sft.qwen2_5_14b_full,
    "sft-qwen2.5-72b-qlora": sft.qwen2_5_72b_qlora,
    "sft-qwen2.5-72b-full": sft.qwen2_5_72b_full,
    "sft-qwen2.5-vl-7b-lora": sft.qwen2_5_vl_7b_lora,
    "sft-qwen2.5-vl-7b-full": sft.qwen2_5_vl_7b_full,
    "preflight": preflight.preflight,
    "gpu-check": gpu_check.gpu_check,
    "serve": serving.serve,
}


def get(name: str) -> Recipe:
    """The recipe of that name, or of `file.py:function`. Raises ConfigError naming the nearest one."""
    if recipe_files.is_python(name):
        recipe = with_placement(recipe_files.from_python(name))
        validate(recipe)
        return recipe
    if name not in RECIPES:
        near = [one for one in RECIPES if name and one.startswith(name)]
        # A model's name is in several: GRPO is what this project is for, and it comes first.
        held = [one for one in RECIPES if len(name) > 3 and name.lower() in one]
        if held and not near:
            held.sort(key=lambda one: not one.startswith("grpo"))
            raise ConfigError(f"unknown recipe {name}: it is part of {', '.join(held[:6])}")
        if "/" in name and model_shapes.is_hub_id(name):
            raise ConfigError(
                f"{name} is a model, and here stands a recipe's name: give a recipe of a model of its kind"
                f" (`python3 launch.py list`) and --set model.path={name}"
            )
        near = near or difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "see `python3 launch.py list`"
        if len(near) > 1:
            hint = f"it is the beginning of {', '.join(near)}"
        raise ConfigError(f"unknown recipe {name}: {hint}")
    recipe = with_placement(RECIPES[name]())
    if recipe.name != name:
        raise ConfigError(f"recipe {name} calls itself {recipe.name}: make the two agree in recipes/presets")
    validate(recipe)
    return recipe


def resolve(name: str, overrides: list[str]) -> Recipe:
    """The recipe of that name with its overrides, validated; with `fleet.run` one machine that samples for
    that run."""
    base = get(name)
    recipe = own_data.with_own_rows(override(base, overrides), overrides)
    if base.cluster.gpus_per_node and not recipe.cluster.gpus_per_node and not recipe.setup:
        raise ConfigError(
            f"cluster.gpus_per_node is 0, and {name} is made for GPUs: give 1 or more, or setup=cpu besides "
            "for a try-out on CPU ranks"
        )
    recipe = expectations.of_changed(headings.with_new_name(recipe, base), base)
    validate(recipe)
    if recipe.storage.bucket:
        # keys are joined to it with one slash
        bucket = BucketAddress.parse(recipe.storage.bucket, "storage.bucket")
        recipe = replace(recipe, storage=replace(recipe.storage, bucket=bucket.url))
    return sample_group.worker_machine(recipe) if recipe.config.fleet.run else recipe
