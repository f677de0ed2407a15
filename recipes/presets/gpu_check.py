"""The first hour on a card, as one command: what only a GPU can show, measured beside the plan."""

from __future__ import annotations

from dataclasses import replace

from recipes.presets.demo import demo
from recipes.presets.parts import with_parts
from recipes.recipe.spec import Budget, Cluster, Recipe
from trainer.config import Expected


def gpu_check() -> Recipe:
    """One GPU of 80 GB by default; then `--set cluster.gpus_per_node=8`, then two nodes.

    Its own run is the demo on the GPUs of all nodes; what else it measures stands in recipes/gpu_check.py.
    """
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
    config = replace(config, expected=Expected())  # the demo's bands are of fp32 on CPUs
    return replace(
        recipe,
        name="gpu-check",
        description="What only a card can show, in checks of a few minutes: kernels, parity, memory, rates",
        kind="check",
        config=config,
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
