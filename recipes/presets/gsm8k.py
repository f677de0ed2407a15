"""GRPO of text models on GSM8K: the smallest real run, and the common example of other stacks."""

from __future__ import annotations

from recipes.presets.parts import CLUSTERS, DATASETS, TEXT_MODELS, cloud_run, prepare_step, with_parts
from recipes.recipe.spec import Budget, Recipe


def _grpo(size: str, cluster: str, prompts: int, tensor_parallel: int) -> Recipe:
    name = f"grpo-qwen2.5-{size}-gsm8k"
    config = with_parts(
        cloud_run(name, TEXT_MODELS[size], "gsm8k"),
        data={"episodes": 15, "prompt_max_tokens": 512},
        rollout={"prompts_per_step": prompts, "max_tokens": 1024, "samples_per_prompt": 5,
                 "tensor_parallel": tensor_parallel},
        algorithm={"samples_per_update": prompts * 5 // 4},
        optimizer={"learning_rate": 1e-6},
        evaluation={"every_steps": 20},
        # On one GPU with 0.5B the longest rows fit without computing anything twice.
        model={"gradient_checkpointing": size != "0.5b"},
    )  # fmt: skip
    return Recipe(
        name=name,
        description=f"GRPO of Qwen2.5-{size.upper()} on GSM8K",
        config=config,
        cluster=CLUSTERS[cluster],
        dataset=DATASETS["gsm8k"],
        steps=(prepare_step("gsm8k"),),
        budget=Budget(max_hours=24),
    )


def qwen2_5_0_5b_gsm8k() -> Recipe:
    """One GPU."""
    return _grpo("0.5b", "1x1", prompts=256, tensor_parallel=1)


def qwen2_5_7b_gsm8k() -> Recipe:
    """One node of 8."""
    return _grpo("7b", "1x8", prompts=1024, tensor_parallel=2)
