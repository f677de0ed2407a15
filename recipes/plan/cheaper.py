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
    changes = []
    if recipe.cluster.spot == "never":  # machines that may vanish, where the recipe wants none
        wanted = override(recipe, ["cluster.spot=prefer"])
        others = cost.offers(wanted, catalogs, targets, network_gbit_s=network_gbit_s)
        if offer := next((offer for offer in others if offer.usd is not None and offer.spot), None):
            change = f"--set cluster.spot=prefer --target {offer.target}"
            but = f"{offer.gpu}, {offer.preemptions:.1f} preemptions expected"
            changes.append(CheaperChange("spot", change, offer.hours, offer.usd, but))
    elsewhere = (offer for offer in offers if offer.usd is not None and offer.target not in targets)
    if offer := next(elsewhere, None):  # a cloud that cannot be driven from here as it is
        needs = TARGETS[offer.target].needs or choice.missing_here(offer.target)
        but = f"{offer.gpu} {cost.market_of(offer.spot)}; needs {needs}"
        kind = "spot elsewhere" if offer.spot else "another cloud"
        changes.append(CheaperChange(kind, f"--target {offer.target}", offer.hours, offer.usd, but))
    now = _cost(taken)
    return sorted((change for change in changes if _cost(change) <= WORTH * now), key=_cost)


def _cost(run: Offer | CheaperChange) -> float:
    """Dollars, or hours of machines that cost none."""
    return run.hours if run.usd is None else run.usd
