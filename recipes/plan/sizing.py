"""The fewest GPUs that score or serve a model."""

from __future__ import annotations

from recipes.plan import memory
from recipes.spec import Recipe, override
from trainer.config import ConfigError

COUNTS = (1, 2, 4, 8)
SEQUENCES = 16
"""Longest sequences that an engine's KV cache must hold at once."""


def fewest_gpus(recipe: Recipe) -> list[str]:
    """Overrides of cluster and engine for one node; [] where the recipe has no GPUs. Raises ConfigError where
    none of 8 GPUs has the room, or the model's shape is not known."""
    if not recipe.cluster.gpus_per_node:
        return []
    longest = recipe.config.longest_sequence
    for gpus in COUNTS:
        for ranks in COUNTS if recipe.kind == "train" else (gpus,):
            if ranks > gpus:
                break
            sized = ["cluster.nodes=1", f"cluster.gpus_per_node={gpus}", f"rollout.tensor_parallel={ranks}"]
            need = memory.plan(override(recipe, sized))
            if need is None:
                raise ConfigError(
                    f"the shape of {recipe.config.model.path} is not known here: give --set"
                    " cluster.gpus_per_node=N and --set rollout.tensor_parallel=N"
                )
            if need.shape.heads % ranks == 0 and need.fits and need.kv_cache_tokens >= SEQUENCES * longest:
                return sized
    raise ConfigError(
        f"{recipe.config.model.path} does not fit 8 x {recipe.cluster.gpu} with {SEQUENCES} sequences of"
        f" {longest} tokens: lower rollout.max_tokens, or take GPUs with more memory (--set cluster.gpu=H200)"
    )
