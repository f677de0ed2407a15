"""What fits: the fewest GPUs that score or serve a model, and what makes a recipe fit that does not."""

from __future__ import annotations

import math
from itertools import combinations

from recipes.plan import memory
from recipes.recipe.spec import Recipe, override, validate
from trainer.config import ConfigError

COUNTS = (1, 2, 4, 8)
SEQUENCES = 16
"""Longest sequences that an engine's KV cache must hold at once."""
STEP_TOKENS = 1024
"""Lengths of completions that are tried are multiples of it."""


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
            need = memory.plan_memory(override(recipe, sized))
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


REMEDIES: tuple[tuple[str, str], ...] = (
    ("algorithm.logprob_tokens", "4096"),
    ("model.gradient_checkpointing", "true"),
    ("algorithm.micro_batch_tokens", "4096"),
    ("optimizer.hpz_ranks", "1"),
    ("optimizer.zero_stage", "3"),
    ("optimizer.live_parameters", "0"),
    ("optimizer.offload_reference", "true"),
    ("optimizer.grad_accum_dtype", "bf16"),
    ("rollout.tensor_parallel", "2"),
    ("rollout.tensor_parallel", "4"),
    ("rollout.tensor_parallel", "8"),
    ("rollout.gpu_memory_utilization", "0.6"),
    ("optimizer.offload_optimizer", "true"),
    ("rollout.gpu_memory_utilization", "0.3"),
    ("cluster.nodes", "2"),
    ("cluster.nodes", "4"),
    ("cluster.nodes", "8"),
)
"""From what costs least (smaller passes, a recomputation) to what costs most (more machines)."""


def cheapest_fix(recipe: Recipe, gpu: str = "") -> list[str]:
    """Overrides, cheapest first, that make a recipe fit; empty if it fits as it is or nothing here helps.

    Every single change is tried first, then pairs, in order of cost.
    """
    current = memory.plan_memory(recipe, gpu)
    if current is None or current.fits:
        return []
    useful = [change for change in REMEDIES if _tried(recipe, (change,))]
    pairs = [pair for pair in combinations(useful, 2) if pair[0][0] != pair[1][0]]
    pairs.sort(key=lambda pair: useful.index(pair[1]))
    for changes in (*((change,) for change in useful), *pairs):
        changed = _tried(recipe, changes)
        fixed = memory.plan_memory(changed, gpu) if changed else None
        if fixed and fixed.fits:
            return [f"{key}={value}" for key, value in changes]
    return []


def _tried(recipe: Recipe, changes: tuple[tuple[str, str], ...]) -> Recipe | None:
    """The recipe with the changes; None where one is not a change for the better or is not valid."""
    try:
        changed = override(recipe, [f"{key}={value}" for key, value in changes])
        validate(changed)
    except ConfigError:
        return None
    fewer_nodes = changed.cluster.nodes < recipe.cluster.nodes
    fewer_ranks = changed.config.rollout.tensor_parallel < recipe.config.rollout.tensor_parallel
    return None if fewer_nodes or fewer_ranks or changed == recipe else changed


def advice(recipe: Recipe, gpu: str = "") -> str:
    """What to change in a recipe that does not fit, for a message: the cheapest options; else the longest
    completions that fit; else more or larger machines."""
    if fix := cheapest_fix(recipe, gpu):
        return " ".join(f"--set {change}" for change in fix)
    machines = "more nodes, or GPUs with more memory"
    if longest := longest_completions(recipe, gpu):
        return f"{machines}, or --set rollout.max_tokens={longest}, the longest completions that fit"
    return machines


def longest_completions(recipe: Recipe, gpu: str = "") -> int:
    """The largest `rollout.max_tokens` below the recipe's that fits, in steps of `STEP_TOKENS`; 0 if none
    does."""
    fits, too_long = 0, math.ceil(recipe.config.rollout.max_tokens / STEP_TOKENS)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        shorter = override(recipe, [f"rollout.max_tokens={middle * STEP_TOKENS}"])
        need = memory.plan_memory(shorter, gpu)
        if need is not None and need.fits:
            fits = middle
        else:
            too_long = middle
    return fits * STEP_TOKENS
