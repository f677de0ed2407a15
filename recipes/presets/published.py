"""Recipes as others published them, with every option that their pages and files state: docs/published.md.

What a published run did otherwise, and this trainer does not do, stands in that page's last column.
"""

from __future__ import annotations

from dataclasses import replace

from recipes.presets import expectations
from recipes.presets.parts import CLUSTERS, DATASETS, VISION_MODELS, cloud_run, prepare_step, with_parts
from recipes.recipe.spec import Budget, Cluster, DataFacts, Recipe, Step
from trainer.config import Expected, RunConfig

H100_NODE = Cluster(nodes=1, gpus_per_node=8, gpu="H100")
"""What EasyR1's table was measured on; no alternative, since seconds are promised."""


def _recipe(
    name: str,
    what: str,
    config: RunConfig,
    cluster: Cluster,
    data: DataFacts,
    step: Step,
    hours: int,
    expected: Expected,
) -> Recipe:
    return Recipe(
        name=name,
        description=f"GRPO of {what} ({cluster.nodes} x {cluster.gpus_per_node})",
        config=replace(config, expected=expected),
        cluster=cluster,
        dataset=data,
        steps=(step,),
        budget=Budget(max_hours=hours),
    )


def _geometry3k(size: str, cluster: Cluster, tensor_parallel: int, expected: Expected) -> Recipe:
    """EasyR1's Geometry3K: 60 steps of 512 prompts x 5 completions, four updates each, 15 passes over 2,101
    rows."""
    name = f"grpo-qwen2.5-vl-{size}-geometry3k"
    config = with_parts(
        cloud_run(name, VISION_MODELS["qwen2.5-vl"][size], "geometry3k"),
        run={"max_steps": 60},
        model={"min_pixels": 262_144, "max_pixels": 4_194_304},
        data={"episodes": 15, "prompt_max_tokens": 2048, "system_prompt": "ours"},
        rollout={
            "prompts_per_step": 512,
            "samples_per_prompt": 5,
            "max_tokens": 2048,
            "temperature": 1.0,
            "tensor_parallel": tensor_parallel,
        },
        algorithm={
            "samples_per_update": 128 * 5,
            "kl_coef": 1e-2,
            "clip_low": 0.2,
            "clip_high": 0.3,
            "dual_clip": 3.0,
            "rollout_correction": "off",
        },
        optimizer={"learning_rate": 1e-6, "betas": (0.9, 0.999), "weight_decay": 1e-2},
        rewards={"answer": "boxed", "accuracy_weight": 0.9, "format_weight": 0.1},
        evaluation={"every_steps": 5, "split": "test", "temperature": 0.6, "top_p": 0.95},
    )
    what = f"Qwen2.5-VL-{size.upper()} on geometry3k as EasyR1 published it"
    return _recipe(
        name, what, config, cluster, DATASETS["geometry3k"], prepare_step("geometry3k"), 24, expected
    )


def qwen2_5_vl_3b_geometry3k() -> Recipe:
    """One node of 8 H100, as the published figures."""
    return _geometry3k("3b", H100_NODE, 1, expectations.geometry3k(0.24, 0.38, 120.0))


def qwen2_5_vl_7b_geometry3k() -> Recipe:
    """One node of 8 H100, as the published figures."""
    return _geometry3k("7b", H100_NODE, 2, expectations.geometry3k(0.37, 0.48, 145.0))


def qwen2_5_vl_7b_mmk12() -> Recipe:
    """MM-Eureka's 7B: no KL, frozen tower, ten passes over its 15k rows."""
    name = "grpo-qwen2.5-vl-7b-mmk12"
    data = DataFacts(name="mmk12", rows=15_000, prompt_tokens=420, answer_tokens=500, disk_gib=4.0)
    config = with_parts(
        cloud_run(name, VISION_MODELS["qwen2.5-vl"]["7b"], "mmk12"),
        model={"freeze_vision": True},
        data={"episodes": 10},
        rollout={
            "prompts_per_step": 128,
            "samples_per_prompt": 8,
            "max_tokens": 4096,
            "temperature": 1.0,
            "tensor_parallel": 2,
        },
        algorithm={"kl_coef": 0.0},
        optimizer={"learning_rate": 1e-6},
        evaluation={"every_steps": 50, "max_samples": 256, "split": "test"},
    )
    what = "Qwen2.5-VL-7B on mmk12 as MM-Eureka published it"
    return _recipe(name, what, config, CLUSTERS["2x8"], data, prepare_step("mmk12"), 96, expectations.MMK12)


def _counting(name: str, data: DataFacts, step: Step, held_out: str) -> Recipe:
    """NeMo-RL's 3B on CLEVR: 200 steps of 8 prompts x 16 completions on two GPUs."""
    config = with_parts(
        cloud_run(name, VISION_MODELS["qwen2.5-vl"]["3b"], data.name),
        run={"max_steps": 200},
        data={"prompt_max_tokens": 1024},
        rollout={
            "prompts_per_step": 8,
            "samples_per_prompt": 16,
            "max_tokens": 1024,
            "temperature": 1.0,
        },
        algorithm={"kl_coef": 0.01, "rollout_correction": "off"},
        optimizer={
            "learning_rate": 5e-7,
            "warmup_steps": 50,
            "betas": (0.9, 0.999),
            "weight_decay": 0.01,
            "grad_accum_dtype": "bf16",
        },
        rewards={"accuracy_weight": 0.8, "format_weight": 0.2},
        evaluation={"every_steps": 10, "max_samples": 256, "split": held_out},
    )
    cluster = Cluster(nodes=1, gpus_per_node=2, gpu="H100", alternatives=("A100-80GB",))
    what = f"Qwen2.5-VL-3B on {data.name} with NeMo-RL's settings for CLEVR"
    return _recipe(name, what, config, cluster, data, step, 8, expectations.clevr())


def qwen2_5_vl_3b_clevr() -> Recipe:
    """Two GPUs: the cheapest check of a whole run on a cloud."""
    data = DataFacts(
        name="clevr", rows=70_000, held_out="validation", prompt_tokens=250, answer_tokens=120, disk_gib=8.0
    )
    return _counting("grpo-qwen2.5-vl-3b-clevr", data, prepare_step("clevr"), "validation")


def qwen2_5_vl_3b_counting() -> Recipe:
    """The same on rows that are drawn on the machine, where the hub is away."""
    data = DataFacts(
        name="counting",
        rows=10_000,
        held_out="validation",
        prompt_tokens=250,
        answer_tokens=120,
        disk_gib=1.0,
    )
    step = Step(
        creates="${DATA}/counting/manifest.json",
        module="data_prep",
        args=(
            *("prepare", "generated", "--families", "counting", "--rows", "10200", "--name", "counting"),
            *("--out", "${DATA}/counting"),
        ),
    )
    return _counting("grpo-qwen2.5-vl-3b-counting", data, step, "validation")
