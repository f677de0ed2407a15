"""vLLM's OpenAI-compatible server of a model, or of what a run has trained: `launch.py serve`."""

from __future__ import annotations

from recipes.presets.parts import CLUSTERS, VISION_MODELS
from recipes.recipe.spec import Budget, Cluster, Recipe
from trainer.config import Data, Model, Rollout, Run, RunConfig


def serve() -> Recipe:
    """One GPU; `launch.py serve` takes as many as the model needs. On demand: a server that is taken away is
    gone."""
    one = CLUSTERS["1x1"]
    return Recipe(
        name="serve",
        description="vLLM's server of a model",
        kind="serve",
        config=RunConfig(
            run=Run(name="served", id="${RUN_ID}", dir="${RUNS}/${RUN_ID}"),
            model=Model(path=VISION_MODELS["qwen2.5-vl"]["7b"]),
            data=Data(prompt_max_tokens=4096),
            rollout=Rollout(max_tokens=4096, gpu_memory_utilization=0.87),
        ),
        cluster=Cluster(gpu=one.gpu, alternatives=one.alternatives, nodes=1, gpus_per_node=1, spot="never"),
        budget=Budget(max_hours=8, max_restarts=0),
        targets=(
            "local",
            "skypilot",
            "skypilot-runpod",
            "skypilot-gcp",
            "skypilot-kubernetes",
            "skypilot-aws",
            "skypilot-lambda",
            "skypilot-nebius",
            "dstack-runpod",
            "dstack-gcp",
            "dstack-kubernetes",
            "kubernetes",
        ),
    )
