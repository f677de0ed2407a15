"""Recipes that train no model of yours: checks of machines and of a card, and vLLM's server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from recipes.presets.demo import demo
from recipes.presets.models_and_data import CLUSTERS, MODELS, with_parts
from recipes.recipe.spec import Budget, Cluster, Recipe
from trainer.config import Data, Expected, Model, Rollout, Run, RunConfig


def _preflight() -> Recipe:
    """The node launcher's checks and the collectives of all nodes: run it before you rent for days. Two nodes
    of 8; give `--set cluster.nodes=4` for more. No model, no data, nothing saved."""
    return Recipe(
        name="preflight",
        description="Checks of every node and of the collectives between all GPUs, two minutes at most",
        kind="preflight",
        config=RunConfig(run=Run(name="preflight", id="${RUN_ID}", dir="${RUNS}/${RUN_ID}")),
        cluster=replace(CLUSTERS["2x8"], gpu="A100-80GB", alternatives=("H100",)),
        budget=Budget(max_hours=1, max_restarts=0),
    )


def _gpu_check() -> Recipe:
    """The first hour on a card. One GPU of 80 GB; then `--set cluster.gpus_per_node=8`, then two nodes. Its
    own run is the demo on the GPUs of all nodes; what else it measures stands in recipes/gpu_check.py."""
    recipe = demo()
    config = with_parts(
        recipe.config,
        run={"name": "gpu-check"},
        model={"dtype": "bf16"},
        rollout={"sleep_level": 2, "eager": False, "gpu_memory_utilization": 0.05},
        evaluation={"every_steps": 30},
        checkpoint={"every_steps": 20},
    )
    # The warm-up takes a minute and a half of a card that waits, if it runs on the CPU beside it.
    data, warm_up = recipe.steps
    warm_up = replace(warm_up, args=(*warm_up.args, "--device", "best"))
    return replace(
        recipe,
        name="gpu-check",
        description="What only a card can show, in checks of a few minutes: kernels, parity, memory, rates",
        kind="check",
        config=replace(config, expected=Expected()),  # the demo's bands are of fp32 on CPUs
        steps=(data, warm_up),
        # A save of 3B's shape holds 36 GB on the host beside 36 GB of states, and two lie on the disk.
        cluster=Cluster(
            nodes=1,
            gpus_per_node=1,
            gpu="A100-80GB",
            alternatives=("H100",),
            spot="never",
            memory_gib=104,
            disk_gib=250,
            shm_gib=16,
        ),
        budget=Budget(max_hours=1.25, max_restarts=0),
        targets=(),
    )


def _serve() -> Recipe:
    """One GPU; `launch.py serve` takes as many as the model needs. On demand: a server that is taken away is
    gone."""
    base = CLUSTERS["1x1"]
    return Recipe(
        name="serve",
        description="vLLM's server of a model",
        kind="serve",
        config=RunConfig(
            run=Run(name="served", id="${RUN_ID}", dir="${RUNS}/${RUN_ID}"),
            model=Model(path=MODELS["qwen2.5-vl"]["7b"]),
            data=Data(prompt_max_tokens=4096),
            rollout=Rollout(max_tokens=4096, gpu_memory_utilization=0.87),
        ),
        cluster=Cluster(gpu=base.gpu, alternatives=base.alternatives, nodes=1, gpus_per_node=1, spot="never"),
        budget=Budget(max_hours=8, max_restarts=0),
        targets=("local", "skypilot", "skypilot-runpod", "skypilot-gcp", "skypilot-kubernetes",
                 "skypilot-aws", "skypilot-lambda", "skypilot-nebius", "dstack-runpod", "dstack-gcp",
                 "dstack-kubernetes", "kubernetes"),
    )  # fmt: skip


RECIPES: dict[str, Callable[[], Recipe]] = {
    "preflight": _preflight,
    "gpu-check": _gpu_check,
    "serve": _serve,
}
