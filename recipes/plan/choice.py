"""What a launch without --target takes: one choice, for `plan`, `list` and `up`."""

from __future__ import annotations

from recipes import capabilities
from recipes.plan import cost, prices
from recipes.plan.cost import Offer
from recipes.recipe.spec import Recipe
from trainer.config import ConfigError


def driven_targets(recipe: Recipe) -> list[str]:
    """The targets of a recipe whose launch needs nothing besides our launch environment, or where a SkyPilot
    of yours has fetched the cloud's prices."""
    found = []
    for target in capabilities.targets_for(recipe):
        can = capabilities.CAPABILITIES[target]
        if not can.needs or (prices.sky_catalogs() / can.cloud).is_dir():
            found.append(target)
    return found


def taken_offer(offers: list[Offer], targets: list[str]) -> Offer | None:
    """The cheapest offer of machines for rent on one of the targets."""
    for offer in offers:
        if offer.usd is not None and offer.target in targets:
            return offer
    return None


def cheapest_target(recipe: Recipe) -> str:
    """The default target of a recipe: this machine without GPUs, else the cheapest offer of a cloud that can
    be driven from here. Raises ConfigError where no price is known."""
    if not recipe.cluster.gpus_per_node:
        return "local"
    targets = driven_targets(recipe)
    offers = cost.offers(recipe, prices.sky_catalogs(), targets) if targets else []
    if taken := taken_offer(offers, targets):
        return taken.target
    rented = []
    for name in targets if recipe.kind != "train" else ():
        known = cost.node_prices(recipe, name, prices.sky_catalogs()) if name != "skypilot" else []
        if known:
            rented.append((known[0][0], name))
    if rented:
        return min(rented)[1]
    raise ConfigError(
        f"no target with known prices can run {recipe.name}: name one with --target (docs/targets.md)"
    )
