"""What a launch without --target takes: one choice, for `plan`, `list` and `up`."""

from __future__ import annotations

from recipes.plan import cost, keys, prices
from recipes.plan.cost import Offer
from recipes.platforms.targets import TARGETS, targets_for
from recipes.recipe.spec import Recipe
from trainer.config import ConfigError


def driven_targets(recipe: Recipe) -> list[str]:
    """The targets of a recipe that can be driven from here. Where nothing for rent can be, those that our
    launch environment would drive, or a SkyPilot of yours that has fetched the cloud's prices."""
    able = []
    for target in targets_for(recipe):
        can = TARGETS[target]
        if not can.needs or (prices.sky_catalogs() / can.cloud).is_dir():
            able.append(target)
    ready = [target for target in able if not missing_here(target)]
    for_rent = [name for name in ready if TARGETS[name].sold and not TARGETS[name].chooses]
    return ready if for_rent else able


def missing_here(target: str) -> str:
    """What a launch on a target for rent lacks on this machine, its program or its key; "" if nothing."""
    can = TARGETS[target]
    if can.program not in ("sky", "dstack"):
        return ""
    return keys.missing(can.program, can.cloud)


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
        known = [] if TARGETS[name].chooses else cost.node_prices(recipe, name, prices.sky_catalogs())
        if known:
            rented.append((known[0][0], name))
    if rented:
        return min(rented)[1]
    raise ConfigError(
        f"no target with known prices can run {recipe.name}: name one with --target (docs/targets.md)"
    )
