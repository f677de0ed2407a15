"""What would make a run cheaper: one change each, with the hours and dollars that the plan expects of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipes.plan import choice, cost
from recipes.plan.cost import Offer
from recipes.platforms.targets import TARGETS
from recipes.recipe.spec import Recipe, override

WORTH = 0.97
"""Share of the cost that a proposal may at most leave."""


@dataclass(frozen=True)
class CheaperChange:
    """A change, and what the run then takes."""

    what: str
    """In two words: spot, spot elsewhere, another cloud."""
    change: str
    """What to write on the command line."""
    hours: float
    """What the run then takes."""
    usd: float | None
    """None: on machines of your own."""
    but: str
    """What it needs or gives up."""


def cheaper_changes(
    recipe: Recipe,
    taken: Offer,
    offers: list[Offer],
    targets: list[str],
    network_gbit_s: float | None,
    catalogs: Path,
) -> list[CheaperChange]:
    """Every change that brings something, the cheapest run first. taken: the offer that it is held against.
    offers: all of the recipe. targets: those that can be driven from here. network_gbit_s: between
    nodes, as it was measured; None: the target's."""
    now = _cost(taken.hours, taken.usd)
    found = [*_spot(recipe, targets, network_gbit_s, catalogs), *_elsewhere(offers, targets)]
    better = [one for one in found if _cost(one.hours, one.usd) <= WORTH * now]
    return sorted(better, key=lambda one: _cost(one.hours, one.usd))


def _cost(hours: float, usd: float | None) -> float:
    """Dollars, or hours of machines that cost none."""
    return hours if usd is None else usd


def _spot(
    recipe: Recipe, targets: list[str], network_gbit_s: float | None, catalogs: Path
) -> list[CheaperChange]:
    """Machines that may vanish, where the recipe wants none."""
    if recipe.cluster.spot != "never":
        return []
    wanted = override(recipe, ["cluster.spot=prefer"])
    for offer in cost.offers(wanted, catalogs, targets, network_gbit_s=network_gbit_s):
        if offer.usd is not None and offer.spot:
            change = f"--set cluster.spot=prefer --target {offer.target}"
            but = f"{offer.gpu}, {offer.preemptions:.1f} preemptions expected"
            return [CheaperChange("spot", change, offer.hours, offer.usd, but)]
    return []


def _elsewhere(offers: list[Offer], targets: list[str]) -> list[CheaperChange]:
    """The cheapest machines of a cloud that cannot be driven from here as it is."""
    for offer in offers:
        if offer.usd is not None and offer.target not in targets:
            needs = TARGETS[offer.target].needs or choice.missing_here(offer.target)
            but = f"{offer.gpu} {cost.market_of(offer.spot)}; needs {needs}"
            what = "spot elsewhere" if offer.spot else "another cloud"
            return [CheaperChange(what, f"--target {offer.target}", offer.hours, offer.usd, but)]
    return []
