"""Dollars per hour of each group of machines of a recipe, and of all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from recipes.plan import cost
from recipes.plan.memory import with_resources
from recipes.platforms.targets import target_named, targets_for
from recipes.recipe import sample_group
from recipes.recipe.spec import Recipe


@dataclass(frozen=True)
class GroupRate:
    """What one group of machines is expected to be rented as."""

    gpu: str
    spot: bool
    usd: float
    """Dollars per hour, all machines of the group."""


@dataclass(frozen=True)
class Hourly:
    """Both groups of a recipe on one target. None: no known price."""

    target: str
    run: GroupRate | None
    sample: GroupRate | None

    @property
    def usd(self) -> float | None:
        """Dollars per hour of both together."""
        return self.run.usd + self.sample.usd if self.run and self.sample else None


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


def of_groups(
    recipe: Recipe, offers: list[cost.Offer], catalogs: Path | None = None, targets: list[str] | None = None
) -> list[Hourly]:
    """Both groups on every target for rent, cheapest first. offers: of the run's own machines, in order; the
    first of a target is what a launch there is expected to get. Empty without a second group."""
    sampling = sample_group.sampling_machines(recipe)
    if sampling is None:
        return []
    found = []
    for target in targets or targets_for(recipe):
        if target_named(target).chooses:  # its machines are those of RunPod and GCP
            continue
        own = [offer for offer in offers if offer.target == target and offer.usd_per_hour]
        run = GroupRate(own[0].gpu, own[0].spot, own[0].usd_per_hour or 0.0) if own else None
        sample = cheapest(sampling, target, catalogs)
        if run or sample:
            found.append(Hourly(target, run, sample))
    return sorted(found, key=lambda hourly: hourly.usd or math.inf)


def cheapest(sampling: Recipe, target: str, catalogs: Path | None = None) -> GroupRate | None:
    """The cheapest machines of a sampling group on a target that have the memory for it, in GPU and RAM, and
    keep to the budget's dollars per node."""
    sampling, gpus = with_resources(sampling), sampling.cluster.gpus_per_node
    most = sampling.budget.max_hourly_usd or math.inf
    rates = []
    for _, gpu, _, row in cost.possible_places(sampling, catalogs, [target]):
        if row is None or cost.lacks_ram(sampling, row):
            continue
        for spot in cost.markets(sampling, target):
            usd = row.spot if spot else row.on_demand
            if usd is not None and usd * gpus <= most:
                rates.append(GroupRate(gpu, spot, usd * gpus * sampling.jobs))
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
