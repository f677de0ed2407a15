"""Runs that others have published, as recipes of ours: the same model's shape, GPUs, samples and lengths."""

from __future__ import annotations

from dataclasses import replace

from recipes.plan.memory import MemoryPlan, plan
from recipes.presets import get
from recipes.spec import DataFacts, Recipe, override
from trainer.hardware.model_shapes import Shape

LLAMA_8B = Shape(hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336, vocabulary=128_256)
QWEN3_32B = Shape(hidden=5120, layers=64, heads=64, kv_heads=8, intermediate=25600, vocabulary=151_936)
PROMPT = 110
"""Tokens of a prompt of OpenMathInstruct-2 with its template (assumption; the published mean includes it)."""


def nemo(nodes: int, tensor_parallel: int, mean_length: int) -> Recipe:
    """NeMo-RL v0.4, GRPO on H100: 64 prompts of 32 completions in updates of 512, 4,096 tokens at most, with
    a KL term.

    https://github.com/NVIDIA-NeMo/RL/blob/main/docs/about/performance-summary.md, and
    examples/configs/recipes/llm/performance there.
    """
    recipe = override(
        get("grpo-qwen2.5-7b-gsm8k"),
        [f"cluster.nodes={nodes}", "cluster.gpu=H100", f"rollout.tensor_parallel={tensor_parallel}",
         "rollout.prompts_per_step=64", "rollout.samples_per_prompt=32", f"rollout.max_tokens={4096 - PROMPT}",
         "algorithm.samples_per_update=512", "rollout.gpu_memory_utilization=0.6"],
    )  # fmt: skip
    return replace(
        recipe, dataset=DataFacts(rows=10**6, prompt_tokens=PROMPT, answer_tokens=mean_length - PROMPT)
    )


def with_shape(recipe: Recipe, shape: Shape) -> tuple[Recipe, MemoryPlan]:
    """The recipe, and its plan as if its model had that shape."""
    from trainer.hardware import model_shapes

    known = model_shapes.KNOWN
    path = f"published/{shape.hidden}"
    known[path] = shape
    try:
        recipe = replace(recipe, config=replace(recipe.config, model=replace(recipe.config.model, path=path)))
        need = plan(recipe)
    finally:
        del known[path]
    assert need
    return recipe, need
