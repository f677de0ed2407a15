"""What `plan` says where a deadline or a budget was given: the offer that keeps it, or what would."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from recipes.plan import cost, prices
from recipes.plan.offer_choice import RUNS, SURE, JudgedOffer, choose_offer
from recipes.platforms.targets import target_named
from recipes.recipe.spec import Recipe
from recipes.screens.plan_facts import PlanLimits

REGIONS = 4
"""That are named, of all that the catalog lists."""
FACTORS = (2, 4, 8, 0.5, 0.25)
"""Times the recipe's nodes that are tried where no offer keeps the limits."""


def keep_limits(
    recipe: Recipe,
    offers: list[cost.Offer],
    hours: float,
    usd: float,
    catalogs: Path,
    offers_of: Callable[[str], list[cost.Offer]],
) -> PlanLimits:
    """The offer that keeps a deadline and a budget, infinite where none was given, and what it gives up; else
    the nearest, and how many nodes would do. offers_of: the recipe's with one more setting."""
    given = None if math.isinf(hours) else hours, None if math.isinf(usd) else usd
    chosen, judged = choose_offer(offers, hours, usd)
    if chosen:
        saved = f"saved every {chosen.offer.interval_s / 60:.0f} min"
        expected = f"{chosen.offer.hours:.1f} h and ${chosen.offer.usd or 0:,.0f} expected"
        lines = [
            f"{chosen.name}: {expected}; {SURE:.0%} of {RUNS} simulated runs end within {_takes(chosen)}"
        ]
        lines[0] += f", {saved}"
        return PlanLimits(
            *given, True, [*lines, _regions(recipe, chosen.offer, catalogs), *_gives_up(chosen, judged)]
        )
    lines = [f"no offer keeps the limits in {SURE:.0%} of {RUNS} simulated runs: no price is known"]
    if judged:
        nearest = min(judged, key=lambda offer: _excess(offer, hours, usd))
        lines[0] = lines[0].replace("no price is known", f"the nearest is {nearest.name}, {_takes(nearest)}")
    for nodes in (recipe.cluster.nodes * factor for factor in FACTORS):
        change = f"cluster.nodes={nodes:g}"
        cure = choose_offer(offers_of(change), hours, usd)[0] if nodes >= 1 and nodes % 1 == 0 else None
        if cure:
            lines.append(f"--set {change} keeps them: {cure.name}, {_takes(cure)} in {SURE:.0%} of its runs")
            break
    return PlanLimits(*given, False, lines)


def _takes(judged: JudgedOffer) -> str:
    """Hours and dollars that most runs stay within."""
    return f"{judged.hours:.1f} h and ${judged.usd or 0:,.0f}"


def _excess(judged: JudgedOffer, hours: float, usd: float) -> float:
    """How many times the worse of the two limits is exceeded by what most runs stay within."""
    return max(judged.hours / hours, (judged.usd or 0.0) / usd)


def _gives_up(chosen: JudgedOffer, judged: list[JudgedOffer]) -> list[str]:
    """What other offers had that the chosen one has not: more speed, or fewer dollars."""
    lines = []
    hours, usd = chosen.offer.hours, chosen.offer.usd or 0.0
    fast = min(judged, key=lambda each: each.offer.hours)
    cheap = min(judged, key=lambda each: each.offer.usd or 0.0)
    if fast.offer.hours < hours:
        more = (fast.offer.usd or 0.0) - usd
        lines.append(
            f"gives up {hours - fast.offer.hours:.1f} hours: {fast.name} is faster, for ${more:,.0f} more"
        )
    if (cheap.offer.usd or 0.0) < usd:
        less = usd - (cheap.offer.usd or 0.0)
        keeps = f"keeps the limits in {cheap.kept:.0%} of its runs"
        lines.append(f"gives up ${less:,.0f}: {cheap.name} is cheaper, and {keeps}")
    return lines


def _regions(recipe: Recipe, offer: cost.Offer, catalogs: Path) -> str:
    """The regions that the platform tries, cheapest first, and how to keep to one."""
    if recipe.site.region:
        return f"in {recipe.site.region} alone (site.region)"
    can, count = target_named(offer.target), recipe.cluster.gpus_per_node
    form = can.price_variant(recipe, offer.gpu)
    usd_by_region = prices.region_prices(
        can.price_market(recipe), offer.gpu, offer.spot, catalogs, form, count
    )
    if not usd_by_region:
        return "in any region: SkyPilot's catalog, which has the prices of each, is not on this machine"
    cheapest = ", ".join(f"{name} ${usd:.2f}" for name, usd in list(usd_by_region.items())[:REGIONS])
    more = f", and {len(usd_by_region) - REGIONS} more" if len(usd_by_region) > REGIONS else ""
    return (
        f"per GPU-hour in {cheapest}{more}: the platform tries the cheapest first; --set site.region=NAME"
        " keeps to one"
    )
