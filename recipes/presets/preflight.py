"""The node launcher's checks and the collectives of all nodes, two minutes at most: run it before you rent
for days."""

from __future__ import annotations

from dataclasses import replace

from recipes.presets.parts import CLUSTERS
from recipes.recipe.spec import Budget, Recipe
from trainer.config import Run, RunConfig


def preflight() -> Recipe:
    """Two nodes of 8 by default; give `--set cluster.nodes=4` for more. No model, no data, nothing saved."""
    return Recipe(
        name="preflight",
        description="Checks of every node and of the collectives between all GPUs, two minutes at most",
        kind="preflight",
        config=RunConfig(run=Run(name="preflight", id="${RUN_ID}", dir="${RUNS}/${RUN_ID}")),
        cluster=replace(CLUSTERS["2x8"], gpu="A100-80GB", alternatives=("H100",)),
        budget=Budget(max_hours=1, max_restarts=0),
    )
