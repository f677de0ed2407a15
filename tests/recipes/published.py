"""Runs that others have published, as recipes of ours: the same model's shape, GPUs, samples and lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recipes.plan.memory import plan_memory
from recipes.presets import get
from recipes.recipe.resolved import MemoryPlan
from recipes.recipe.spec import DataFacts, Recipe, override
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
        [
            f"cluster.nodes={nodes}",
            "cluster.gpu=H100",
            f"rollout.tensor_parallel={tensor_parallel}",
            "rollout.prompts_per_step=64",
            "rollout.samples_per_prompt=32",
            f"rollout.max_tokens={4096 - PROMPT}",
            "algorithm.samples_per_update=512",
            "rollout.gpu_memory_utilization=0.6",
        ],
    )
    return replace(
        recipe, dataset=DataFacts(rows=10**6, prompt_tokens=PROMPT, answer_tokens=mean_length - PROMPT)
    )


@dataclass(frozen=True)
class VisionRun:
    """A published step of GRPO with images, and its settings as a recipe."""

    name: str
    seconds: tuple[float, float]
    """The least and the most that is published for one step."""
    source: str
    preset: str
    settings: tuple[str, ...]
    prompt_tokens: int
    answer_tokens: int

    def recipe(self, alone: bool = False) -> Recipe:
        """alone: each completion is computed with a prompt and an image of its own, as their trainer does it,
        where ours computes the prompt once for its group."""
        recipe = override(get(self.preset), ["cluster.nodes=1", "cluster.gpus_per_node=8", *self.settings])
        rollout = recipe.config.rollout
        if alone:
            rows = rollout.prompts_per_step * rollout.samples_per_prompt
            recipe = override(recipe, [f"rollout.prompts_per_step={rows}", "rollout.samples_per_prompt=1"])
        data = DataFacts(rows=10**6, prompt_tokens=self.prompt_tokens, answer_tokens=self.answer_tokens)
        return replace(recipe, dataset=data)


_EASYR1 = (
    "cluster.gpu=H100", "cluster.alternatives=[]", "rollout.prompts_per_step=512",
    "rollout.samples_per_prompt=5", "rollout.max_tokens=2048", "algorithm.samples_per_update=640",
    "algorithm.kl_coef=0.01", "model.min_pixels=262144", "model.max_pixels=4194304",
)  # fmt: skip
_TABLE = "EasyR1 v0.3.2, assets/baselines.md: Geometry3K, 8 H100"
VISION_RUNS = (
    # 772 tokens a sample, 347 of them sampled: the token rates of the log in hiyouga/EasyR1#24, which the
    # table's 2,000 tokens per second and GPU agree with.
    VisionRun("3B", (120, 120), _TABLE, "grpo-qwen2.5-vl-3b-geometry3k",
              (*_EASYR1, "rollout.tensor_parallel=2"), 425, 347),
    VisionRun("7B", (120, 145), _TABLE, "grpo-qwen2.5-vl-7b-geometry3k",
              (*_EASYR1, "rollout.tensor_parallel=2"), 425, 347),
    VisionRun("32B", (530, 530), _TABLE, "grpo-qwen2.5-vl-32b-geometry3k",
              (*_EASYR1, "rollout.tensor_parallel=8"), 425, 347),
    # 16 prompts of eight images of 336 x 336, 8 completions; 26 to 30 hours for 500 steps on 8 A100.
    VisionRun("7B, eight images", (187, 216), "hiyouga/EasyR1#392", "grpo-qwen2.5-vl-7b-geometry3k",
              ("cluster.gpu=A100-80GB", "cluster.alternatives=[]", "rollout.prompts_per_step=16",
               "rollout.samples_per_prompt=8", "rollout.max_tokens=2048", "algorithm.samples_per_update=128",
               "algorithm.kl_coef=0.01", "rollout.tensor_parallel=2"), 1650, 347),
    # A prompt and 7 completions on each of 8 A100, by `generate` of transformers; lengths are assumed.
    VisionRun("3B, no engine", (25, 30), "om-ai-lab/VLM-R1#30", "grpo-qwen2.5-vl-3b-geometry3k",
              ("cluster.gpu=A100-80GB", "cluster.alternatives=[]", "rollout.prompts_per_step=8",
               "rollout.samples_per_prompt=7", "rollout.max_tokens=700", "algorithm.samples_per_update=56",
               "algorithm.kl_coef=0.04"), 520, 150),
)  # fmt: skip


def with_shape(recipe: Recipe, shape: Shape) -> tuple[Recipe, MemoryPlan]:
    """The recipe, and its plan as if its model had that shape."""
    from trainer.hardware import model_shapes

    known = model_shapes.KNOWN
    path = f"published/{shape.hidden}"
    known[path] = shape
    try:
        recipe = replace(recipe, config=replace(recipe.config, model=replace(recipe.config.model, path=path)))
        need = plan_memory(recipe)
    finally:
        del known[path]
    assert need
    return recipe, need
