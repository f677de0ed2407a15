"""How long ranks wait for the slowest one in a step's updates, and what lets them wait less.

A pass lasts as long as its slowest rank. With few samples a rank, one long completion keeps all others
waiting; the more samples an update has for each rank, the better they can be dealt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from recipes.plan.passes import COMPLETIONS, typical_lengths, update_times
from recipes.recipe.spec import DataFacts, Recipe, override
from trainer.config import ConfigError, RunConfig
from trainer.hardware.model_shapes import Shape

HEAVY = 1.0
"""Standard deviation of the logarithm of a completion's length where the tail is heavy: reasoning at the edge
of what a model can do (planning figure)."""
DRAWS = 5
"""Steps that are drawn."""
ENOUGH = 0.85
"""Share of the update from which on nothing is proposed."""
WORTH = 0.04
"""What a change has to bring to be proposed, in shares of the update."""


@dataclass(frozen=True)
class BusyShares:
    """Share of the updates in which ranks compute, by the scheduler's own cost of a pass."""

    typical: float
    """At drawn lengths, mean of DRAWS steps."""
    heavy: float
    """The same with a heavier tail."""
    worst: float
    """The worst step with the heavier tail."""


@dataclass(frozen=True)
class BalanceProposal:
    """A change of options, and what it does."""

    change: str
    busy: BusyShares
    effect: str
    """What else it changes, in words."""


def busy_shares(recipe: Recipe, shape: Shape) -> BusyShares:
    """How busy the ranks are in a recipe's updates."""
    return _of(recipe.config, recipe.dataset, shape)


@lru_cache(maxsize=32)
def _of(config: RunConfig, dataset: DataFacts, shape: Shape) -> BusyShares:
    if config.placement.world_size == 1:
        return BusyShares(1.0, 1.0, 1.0)
    drawn = [_share(config, dataset, shape, seed, COMPLETIONS) for seed in range(DRAWS)]
    heavy = [_share(config, dataset, shape, seed, HEAVY) for seed in range(DRAWS)]
    return BusyShares(sum(drawn) / DRAWS, sum(heavy) / DRAWS, min(heavy))


def _share(config: RunConfig, dataset: DataFacts, shape: Shape, seed: int, spread: float) -> float:
    rng = random.Random(seed)
    lengths = typical_lengths(config, dataset, rng, shape.vision is not None, spread)
    times = update_times(config, shape, lengths, rng)
    slowest = sum(max(ranks) for ranks in times)
    return sum(map(sum, times)) / (slowest * config.placement.world_size)


def balance_proposals(recipe: Recipe, shape: Shape) -> list[BalanceProposal]:
    """Changes that let ranks wait less, the best first; [] where they hardly wait."""
    now = busy_shares(recipe, shape)
    if min(now.typical, now.heavy) >= ENOUGH:
        return []
    found = []
    for change, effect in _changes(recipe.config):
        try:
            changed = override(recipe, [change])
        except ConfigError:  # its numbers do not divide, say
            continue
        busy = busy_shares(changed, shape)
        if busy.heavy - now.heavy >= WORTH or busy.typical - now.typical >= WORTH:
            found.append(BalanceProposal(change, busy, effect))
    return sorted(found, key=lambda one: -(one.busy.typical + one.busy.heavy))


def _changes(config: RunConfig) -> list[tuple[str, str]]:
    """Assignments that may help, and what else each of them changes."""
    if config.method == "sft":
        rows = 2 * config.sft.batch_size
        return [(f"sft.batch_size={rows}", "half as many optimizer steps")]
    changes = []
    updates = config.samples_per_step // config.samples_per_update
    if updates > 1:
        effect = f"one optimizer step per rollout in place of {updates}, each on the policy that sampled it"
        changes.append(("algorithm.samples_per_update=0", effect))
    if updates > 2:
        samples = 2 * config.samples_per_update
        changes.append((f"algorithm.samples_per_update={samples}", "half as many optimizer steps"))
    prompts = 2 * config.rollout.prompts_per_step
    changes.append((f"rollout.prompts_per_step={prompts}", "half as many steps, each twice as long"))
    return changes
