"""What `plan` says where a deadline or a budget was given: the offer that keeps it, or what would."""

from __future__ import annotations

from pathlib import Path

from recipes.plan import cost, offer_choice, prices
from recipes.plan.nearest_offer import Cure
from recipes.platforms.targets import target_named
from recipes.recipe.spec import Recipe

REGIONS = 4
"""That are named, of all that the catalog lists."""


def describe_choice(
    recipe: Recipe, chosen: offer_choice.JudgedOffer, judged: list[offer_choice.JudgedOffer], catalogs: Path
) -> list[str]:
    """What to rent and in which regions, and what that gives up."""
    offer, runs = chosen.offer, f"{offer_choice.SURE:.0%} of {offer_choice.RUNS} simulated runs"
    expected = f"{offer_choice.offer_name(chosen)}: {offer.hours:.1f} h and ${offer.usd or 0:,.0f} expected"
    sure = f"{runs} end within {chosen.hours:.1f} h and ${chosen.usd or 0:,.0f}"
    saved = f"saved every {offer.interval_s / 60:.0f} min"
    gives_up = [f"gives up {line}" for line in offer_choice.given_up(chosen, judged)]
    return [f"{expected}; {sure}, {saved}", _regions(recipe, offer, catalogs), *gives_up]


def describe_no_choice(near: str, cure: Cure | None) -> list[str]:
    """That no offer keeps the limits, which misses them least, and what would keep them."""
    refusal = f"no offer keeps the limits in {offer_choice.SURE:.0%} of {offer_choice.RUNS} simulated runs"
    lines = [f"{refusal}: {near or 'no price is known'}"]
    if cure:
        judged = cure.judged
        takes = f"{judged.hours:.1f} h and ${judged.usd or 0:,.0f} in {offer_choice.SURE:.0%} of its runs"
        lines.append(f"{cure.change} keeps them: {offer_choice.offer_name(judged)}, {takes}")
    return lines


def _regions(recipe: Recipe, offer: cost.Offer, catalogs: Path) -> str:
    """The regions that the platform tries, cheapest first, and how to keep to one."""
    if recipe.site.region:
        return f"in {recipe.site.region} alone (site.region)"
    cloud = target_named(offer.target).price_market(recipe)
    form = target_named(offer.target).price_variant(recipe, offer.gpu)
    count = recipe.cluster.gpus_per_node
    found = prices.region_prices(cloud, offer.gpu, offer.spot, catalogs, form, count)
    if not found:
        return "in any region: SkyPilot's catalog, which has the prices of each, is not on this machine"
    cheapest = ", ".join(f"{name} ${usd:.2f}" for name, usd in list(found.items())[:REGIONS])
    more = f", and {len(found) - REGIONS} more" if len(found) > REGIONS else ""
    return (
        f"per GPU-hour in {cheapest}{more}: the platform tries the cheapest first; --set site.region=NAME"
        " keeps to one"
    )
