"""How full an engine's decode slots are, and what more prompts in a step would bring.

An engine decodes until its longest completion is done, and reads all weights for each of that one's tokens:
the slots of the others are empty by then. With more prompts a step, that time is shared by more samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.plan import cost, memory, passes
from recipes.plan.memory import MemoryPlan
from recipes.spec import Recipe, override, validate
from trainer.config import ConfigError

TIMES = 4
"""Prompts that are tried, as a multiple of the recipe's."""
FULL = 0.5
"""Share of the slots from which on nothing is proposed."""
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


def used(recipe: Recipe, need: MemoryPlan) -> float:
    """Share of the slots that hold a completion, over the time in which engines decode."""
    step = passes.of_step(recipe, need.shape)
    engines = recipe.config.placement.world_size / recipe.config.rollout.tensor_parallel
    waves = max(1.0, step.tokens / engines / max(need.kv_cache_tokens, 1))
    return step.mean * waves / (step.longest + (waves - 1) * step.mean)


def more_prompts(recipe: Recipe, network_gbit_s: float) -> MorePrompts | None:
    """TIMES the prompts with the optimizer's batch unchanged; None where slots are full, where there are too
    few rows, or where it brings little."""
    config, need = recipe.config, memory.plan(recipe)
    if recipe.kind != "train" or config.method != "grpo" or need is None or used(recipe, need) >= FULL:
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
    wider = memory.plan(changed)
    if wider is None or not wider.fits:
        return None
    before = cost.step_time(recipe, need.gpu, network_gbit_s, need).total / config.samples_per_step
    after = cost.step_time(changed, need.gpu, network_gbit_s, wider).total / changed.config.samples_per_step
    updates = [one.samples_per_step // one.samples_per_update for one in (changed.config, config)]
    return MorePrompts(changes, after, before, *updates) if after <= WORTH * before else None
