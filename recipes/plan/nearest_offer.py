"""What is said where no offer keeps a deadline or a budget: how far off the nearest is, and how many nodes
would do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recipes.plan import offer_choice
from recipes.plan.cost import Offer
from recipes.plan.offer_choice import JudgedOffer

FACTORS = (2, 4, 8, 0.5, 0.25)
"""Times the recipe's nodes that are tried: more for a deadline, fewer for a budget."""

OffersOf = Callable[[Sequence[str]], list[Offer]]
"""Offers of the recipe with further settings; [] where none can run it."""


@dataclass(frozen=True)
class Cure:
    """A change of options with which an offer keeps both limits."""

    change: str
    """What to write on the command line."""
    judged: JudgedOffer


def limit_excess(judged: JudgedOffer, deadline_h: float, budget_usd: float) -> float:
    """How many times the worse of the two limits is exceeded by the hours and dollars that most runs stay
    within."""
    dollars = math.inf if judged.usd is None else judged.usd
    return max(judged.hours / deadline_h, dollars / budget_usd if math.isfinite(budget_usd) else 0.0)


def describe_nearest(judged: list[JudgedOffer], deadline_h: float, budget_usd: float) -> str:
    """The offer that misses the limits least, and by how much; "" without offers."""
    if not judged:
        return ""
    best = min(judged, key=lambda one: limit_excess(one, deadline_h, budget_usd))
    misses = []
    if best.hours > deadline_h:
        misses.append(f"{best.hours:.1f} hours where {deadline_h:.3g} were given")
    if best.usd is not None and best.usd > budget_usd:
        misses.append(f"${best.usd:,.0f} where ${budget_usd:,.0f} were given")
    return (
        f"the nearest is {offer_choice.offer_name(best)}: {offer_choice.SURE:.0%} of its runs "
        f"take up to {' and '.join(misses)}"
    )


def other_nodes(nodes: int, offers_of: OffersOf, deadline_h: float, budget_usd: float) -> Cure | None:
    """The first other number of nodes that keeps both limits."""
    for factor in FACTORS:
        count = nodes * factor
        if count < 1 or count != int(count):
            continue
        change = f"cluster.nodes={int(count)}"
        chosen, _ = offer_choice.choose_offer(offers_of([change]), deadline_h, budget_usd)
        if chosen:
            return Cure(f"--set {change}", chosen)
    return None
