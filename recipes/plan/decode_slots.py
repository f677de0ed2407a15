"""How full an engine's decode slots are, and what would fill them.

An engine decodes until its longest completion is done, and reads all weights for each of that one's tokens:
the slots of the others are empty by then. With more prompts a step, that time is shared by more samples.
With completions that are carried over, it ends with the longest piece.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.plan import cost, memory, passes, rollout_phase
from recipes.recipe.resolved import MemoryPlan
from recipes.recipe.spec import Recipe, override, validate
from trainer.config import ConfigError

TIMES = 4
"""Prompts that are tried, as a multiple of the recipe's."""
FULL = 0.5
"""Share of the slots from which on nothing is proposed."""
AHEAD = (1, 3)
"""Values of `rollout.staleness` that are tried with `rollout.tokens_per_step`."""
WORTH = 0.9
"""Share of the time of a sample that a proposal may at most leave."""


@dataclass(frozen=True)
class MorePrompts:
    """A change of options that keeps the optimizer's batch, and what it does."""

    changes: tuple[str, ...]
    sample_s: float
    """Seconds of a sample, with all phases of its step."""
    before_s: float
    """The same as the recipe is."""
    updates: int
    """Optimizer steps of a step."""
    before: int
    """The same as the recipe is."""


def share_of_slots(recipe: Recipe, need: MemoryPlan) -> float:
    """Share of the slots that hold a completion while engines decode (`perf/slots_used`)."""
    phase = rollout_phase.of_step(passes.of_step(recipe, need.shape), recipe.config)
    engines = recipe.config.placement.world_size / recipe.config.rollout.tensor_parallel
    waves = max(1.0, phase.cached / engines / max(need.kv_cache_tokens, 1))
    return phase.mean * waves / (phase.longest + (waves - 1) * phase.mean)


def more_prompts(recipe: Recipe, network_gbit_s: float) -> MorePrompts | None:
    """TIMES the prompts with the optimizer's batch unchanged; None where slots are full, where there are too
    few rows, or where it brings little."""
    config, need = recipe.config, memory.plan_memory(recipe)
    if (
        recipe.kind != "train"
        or config.method != "grpo"
        or need is None
        or share_of_slots(recipe, need) >= FULL
    ):
        return None
    changes = (
        f"rollout.prompts_per_step={TIMES * config.rollout.prompts_per_step}",
        f"algorithm.samples_per_update={config.samples_per_update}",
    )
    try:
        changed = override(recipe, list(changes))
        validate(changed)
        cost.steps_of(changed)
    except ConfigError:
        return None
    wider = memory.plan_memory(changed)
    if wider is None or not wider.fits:
        return None
    before = cost.step_time(recipe, need.gpu, network_gbit_s, need).total / config.samples_per_step
    after = cost.step_time(changed, need.gpu, network_gbit_s, wider).total / changed.config.samples_per_step
    updates = [one.samples_per_step // one.samples_per_update for one in (changed.config, config)]
    return MorePrompts(changes, after, before, *updates) if after <= WORTH * before else None


def piece_options(recipe: Recipe, need: MemoryPlan) -> list[tuple[str, str]]:
    """Options by which completions are carried over in equal pieces of the longest one; none where they are,
    where slots are full, or where nothing is sampled."""
    config = recipe.config
    if recipe.kind != "train" or config.method != "grpo" or config.rollout.tokens_per_step:
        return []
    if share_of_slots(recipe, need) >= FULL:
        return []
    found = []
    for ahead in AHEAD:
        limit = -(-config.rollout.max_tokens // (ahead + 1))
        found.append((f"rollout.staleness={ahead}", f"rollout.tokens_per_step={limit}"))
    return found
