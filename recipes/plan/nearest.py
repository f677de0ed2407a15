"""What is said where no offer keeps a deadline or a budget: how far off the nearest is, and how many nodes
would do."""

from __future__ import annotations

import math
from collections.abc import Callable

from recipes.plan import choose
from recipes.plan.choose import Judged
from recipes.plan.cost import Offer

FACTORS = (2, 4, 8, 0.5, 0.25)
"""Times the recipe's nodes that are tried: more for a deadline, fewer for a budget."""


def excess(judged: Judged, deadline_h: float, budget_usd: float) -> float:
    """How many times the worse of the two limits is exceeded by the hours and dollars that most runs stay
    within."""
    dollars = math.inf if judged.usd is None else judged.usd
    return max(judged.hours / deadline_h, dollars / budget_usd if math.isfinite(budget_usd) else 0.0)


def nearest(judged: list[Judged], deadline_h: float, budget_usd: float) -> str:
    """The offer that misses the limits least, and by how much; "" without offers."""
    if not judged:
        return ""
    best = min(judged, key=lambda one: excess(one, deadline_h, budget_usd))
    misses = []
    if best.hours > deadline_h:
        misses.append(f"{best.hours:.1f} hours where {deadline_h:.3g} were given")
    if best.usd is not None and best.usd > budget_usd:
        misses.append(f"${best.usd:,.0f} where ${budget_usd:,.0f} were given")
    return (
        f"the nearest is {choose.name(best)}: {choose.SURE:.0%} of its runs take up to {' and '.join(misses)}"
    )


def other_nodes(
    nodes: int, offers_of: Callable[[int], list[Offer]], deadline_h: float, budget_usd: float
) -> tuple[int, Judged] | None:
    """(nodes, offer) of the first other number of nodes that keeps both limits. offers_of: [] where none can
    run it."""
    for factor in FACTORS:
        count = nodes * factor
        if count < 1 or count != int(count):
            continue
        chosen, _ = choose.choose(offers_of(int(count)), deadline_h, budget_usd)
        if chosen:
            return int(count), chosen
    return None
