"""What is said where no offer keeps a deadline or a budget: how far off the nearest is, how many nodes would
do, and whether completions that are carried over would."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recipes.plan import decode_slots, memory, offer_choice
from recipes.plan.cost import Offer
from recipes.plan.offer_choice import JudgedOffer
from recipes.recipe.resolved import MemoryPlan
from recipes.recipe.spec import Recipe, override

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
    why: str = ""
    """What it does, and what it gives up; "" where that is plain."""


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


def in_pieces(
    recipe: Recipe, need: MemoryPlan, offers_of: OffersOf, deadline_h: float, budget_usd: float
) -> Cure | None:
    """Completions that are carried over, the fewest steps ahead that keep both limits. need: the recipe's."""
    for changes in decode_slots.piece_options(recipe, need):
        chosen, _ = offer_choice.choose_offer(offers_of(changes), deadline_h, budget_usd)
        if chosen is None:
            continue
        changed = override(recipe, list(changes))
        after = memory.plan_memory(changed, need.gpu) or need
        full, before = decode_slots.share_of_slots(changed, after), decode_slots.share_of_slots(recipe, need)
        why = (
            f"no slot waits for the longest completion: engines use {full:.0%} of their decode slots, not"
            f" {before:.0%}; samples of older weights (docs/asynchronous.md), not run on a GPU"
        )
        return Cure(" ".join(f"--set {change}" for change in changes), chosen, why)
    return None
