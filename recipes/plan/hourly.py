"""Dollars per hour of machines, by target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from recipes.plan import cost
from recipes.plan.memory import with_resources
from recipes.platforms.targets import target_named
from recipes.recipe.spec import Recipe


@dataclass(frozen=True)
class HourlyPrice:
    """What the machines of a recipe cost on one target."""

    usd: float
    """Dollars per hour, all nodes."""
    target: str
    """Where."""
    gpu: str
    """The GPU of its machines."""
    spot: bool
    """Whether it is a price of spot machines."""
    most_usd: float | None
    """What a check, which ends within its hours, costs at most, without start and set-up; None: no check."""


def prices_of(recipe: Recipe, targets: list[str], catalogs: Path) -> list[HourlyPrice]:
    """Every target's known prices, cheapest first."""
    found = []
    for target in targets:
        if target_named(target).chooses:  # it chooses among the others
            continue
        for usd, gpu, spot in cost.node_prices(recipe, target, catalogs):
            hourly = usd * recipe.cluster.nodes
            most = hourly * recipe.budget.max_hours if recipe.kind == "check" else None
            found.append(HourlyPrice(hourly, target, gpu, spot, most))
    return sorted(found, key=lambda one: (one.usd, one.target, one.gpu, one.spot))


def cheapest(sampling: Recipe, target: str, catalogs: Path | None = None) -> HourlyPrice | None:
    """The cheapest machines of a sampling group on a target, all of them, that have the memory for it, in GPU
    and RAM, and keep to the budget's dollars per node."""
    sampling = with_resources(sampling)
    most = sampling.budget.max_hourly_usd or math.inf
    rates = []
    for _, gpu, _, row in cost.possible_places(sampling, catalogs, [target]):
        if row is None or cost.lacks_ram(sampling, row):
            continue
        for spot in cost.markets(sampling, target):
            usd = ((row.spot if spot else row.on_demand) or math.inf) * sampling.cluster.gpus_per_node
            if usd <= most and usd < math.inf:
                rates.append(HourlyPrice(usd * sampling.jobs, target, gpu, spot, None))
    return min(rates, key=lambda rate: rate.usd, default=None)


def short_of_ram(recipe: Recipe, catalogs: Path | None = None, targets: list[str] | None = None) -> list[str]:
    """A line for every machine that has the GPUs but not the RAM that the recipe asks for."""
    recipe = with_resources(recipe)
    asked = recipe.cluster.memory_gib
    lines = []
    for target, gpu, _, row in cost.possible_places(recipe, catalogs, targets):
        if row and cost.lacks_ram(recipe, row):
            lines.append(
                f"{target}, {gpu}: {row.host_gib:g} GiB of RAM come with a GPU,"
                f" {asked} GiB are asked for per node"
            )
    return lines
