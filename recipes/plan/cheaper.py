"""What would make a run cheaper: one change each, with the hours and dollars that the plan expects of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from recipes.plan import choice, cost, decode_slots, exchange, fleet_cost
from recipes.plan.cost import Offer
from recipes.platforms.targets import TARGETS
from recipes.recipe.resolved import MemoryPlan
from recipes.recipe.spec import Recipe, override, validate
from trainer.config import ConfigError

WORTH = 0.97
"""Share of the cost that a proposal may at most leave."""


@dataclass(frozen=True)
class CheaperChange:
    """A change, and what the run then takes."""

    what: str
    """In two words: more prompts, carried over, spot, another cloud, workers."""
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
    need: MemoryPlan,
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
    found = [
        *_more_prompts(recipe, taken, network_gbit_s, catalogs),
        *_carried_over(recipe, need, taken, network_gbit_s, catalogs),
        *_spot(recipe, targets, network_gbit_s, catalogs),
        *_elsewhere(offers, targets),
        *_workers(recipe, taken, catalogs),
    ]
    better = [one for one in found if _cost(one.hours, one.usd) <= WORTH * now]
    return sorted(better, key=lambda one: _cost(one.hours, one.usd))


def _cost(hours: float, usd: float | None) -> float:
    """Dollars, or hours of machines that cost none."""
    return hours if usd is None else usd


def _more_prompts(
    recipe: Recipe, taken: Offer, network_gbit_s: float | None, catalogs: Path
) -> list[CheaperChange]:
    network = network_gbit_s or exchange.network_of(recipe, taken.target)
    more = decode_slots.more_prompts(recipe, network)
    if more is None:
        return []
    changes = list(more.changes)
    if steps := recipe.config.run.max_steps:  # as many samples in all
        changes.append(f"run.max_steps={math.ceil(steps / decode_slots.TIMES)}")
    but = f"{more.updates} updates a step, not {more.before}, on older samples"
    return _with_options("more prompts", recipe, changes, taken, but, network_gbit_s, catalogs)


def _carried_over(
    recipe: Recipe, need: MemoryPlan, taken: Offer, network_gbit_s: float | None, catalogs: Path
) -> list[CheaperChange]:
    """Completions in pieces, so that no decode slot waits for the longest one; the fewest steps ahead."""
    but = "samples of older weights; not run on a GPU"
    for changes in decode_slots.piece_options(recipe, need):
        if found := _with_options(
            "carried over", recipe, list(changes), taken, but, network_gbit_s, catalogs
        ):
            return found
    return []


def _with_options(
    what: str,
    recipe: Recipe,
    changes: list[str],
    taken: Offer,
    but: str,
    network_gbit_s: float | None,
    catalogs: Path,
) -> list[CheaperChange]:
    """The same machines with other options."""
    try:
        changed = override(recipe, changes)
        validate(changed)
        offers = cost.offers(changed, catalogs, [taken.target], network_gbit_s=network_gbit_s)
    except ConfigError:  # its rows do not divide, say
        return []
    change = " ".join(f"--set {one}" for one in changes)
    for offer in offers:
        if (offer.gpu, offer.spot) == (taken.gpu, taken.spot):
            return [CheaperChange(what, change, offer.hours, offer.usd, but)]
    return []


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


def _workers(recipe: Recipe, taken: Offer, catalogs: Path) -> list[CheaperChange]:
    """GPUs of the same target that sample while others learn; `--fleet` compares those of all."""
    fleet = recipe.config.fleet
    if recipe.sample or fleet.gpus_per_node or fleet.workers != "off" or fleet_cost.fleet_refusal(recipe):
        return []
    found = fleet_cost.compare_fleets(recipe, catalogs, [taken.target])
    gains = [row for row in found.fleets if not found.beaten_by(row)]
    if not gains:
        return []
    row = fleet_cost.fewest_ahead(gains, lambda row: row.run_usd)
    assert row.worker is not None
    where = "of the same nodes" if row.worker.own else f"of {row.worker.target}"
    but = f"{row.count} x {row.worker.name} {where} sample {row.ahead} steps ahead of {row.trainer}"
    return [CheaperChange("workers", "--fleet", row.hours, row.run_usd, but)]
