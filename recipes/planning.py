"""`plan`: memory, disk, time and dollars of a recipe, and the choice of an offer under a deadline and a
budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from recipes import capabilities, fleet_table, groups, uploads
from recipes.plan import calibration, choose, cost, fleet_cost, hourly, memory, nearest, prices, zero_stages
from recipes.presets import resolve
from recipes.screens import whole_plan
from recipes.spec import Recipe
from trainer.config import ConfigError


def plan(
    name: str,
    target: str | None,
    overrides: list[str],
    deadline: str = "",
    budget_usd: float | None = None,
    network_gbit_s: float | None = None,
) -> int:
    """Memory, disk, time and dollars of a recipe. Exit code 2 where it does not fit, or no offer keeps the
    limits.

    network_gbit_s: between nodes, for the comparison of ZeRO stages; None: the target's.
    """
    if network_gbit_s is not None and not network_gbit_s > 0:
        raise ConfigError(f"--network-gbit {network_gbit_s:g}: give Gb/s above 0")
    hours, usd = _limits(deadline, budget_usd)
    recipe = resolve(name, overrides)
    if recipe.sample and (deadline or budget_usd):
        raise ConfigError(
            "--deadline and --budget choose by the time of a run without a second group: add --fleet, or "
            "--set sample=null"
        )
    uploads.check_model_folder(recipe)
    if target:
        capabilities.check(recipe, target)
    where = prices.sky_catalogs(), [target] if target else None
    offers = cost.offers(recipe, *where, ranges=True)
    network = network_gbit_s or zero_stages.network_of(recipe, target)
    whole_plan.plan(recipe, offers, cost.short_of_ram(recipe, *where), whole_plan.wide(), network, target)
    if recipe.config.fleet.gpus_per_node and recipe.kind == "train":
        print(fleet_table.own_nodes(recipe, fleet_cost.own_plan(recipe, *where)))
    elif recipe.config.fleet.workers == "only" and recipe.kind == "train":
        print(
            "rollout workers sample for this run: its hours and dollars above are those of engines on its own"
            " GPUs; `python3 launch.py plan RECIPE --fleet` has those with workers"
        )
    sampled = _second_group(recipe, offers, *where)
    if deadline or budget_usd:
        limits = hours, usd
        chosen, judged = choose.choose(_priced(offers), *limits)
        if chosen:
            return whole_plan.choice(recipe, chosen, judged, whole_plan.wide(), where[0])

        def offers_of(nodes: int) -> list[cost.Offer]:
            try:
                changed = resolve(name, [*overrides, f"cluster.nodes={nodes}"])
                return _priced(cost.offers(changed, *where, ranges=True))
            except ConfigError:  # its rows do not divide, say
                return []

        near = nearest.nearest(judged, *limits)
        cure = nearest.other_nodes(recipe.cluster.nodes, offers_of, *limits)
        whole_plan.no_choice(near, cure, whole_plan.wide())
        return 2
    need = memory.plan(recipe)
    return 0 if sampled and (need is None or need.fits) else 2


def fleet(
    name: str, target: str | None, overrides: list[str], deadline: str = "", budget_usd: float | None = None
) -> int:
    """Seconds and dollars of a step with and without rollout workers. Exit code 2 where the machines of
    `sample` are a loss, or nothing keeps the limits."""
    limits = _limits(deadline, budget_usd)
    recipe = resolve(name, overrides)
    uploads.check_model_folder(recipe)
    if target:
        capabilities.check(recipe, target)
    found = fleet_cost.compare(recipe, prices.sky_catalogs(), [target] if target else None)
    console = whole_plan.wide()
    gain = fleet_table.show(recipe, found, console)
    if deadline or budget_usd:
        return 0 if fleet_table.choice(recipe, found, limits, console, name, overrides) else 2
    return 0 if gain else 2


def _limits(deadline: str, budget_usd: float | None) -> tuple[float, float]:
    """Hours and dollars, infinite where none are given. Raises ConfigError."""
    if budget_usd is not None and not budget_usd > 0:
        raise ConfigError(f"--budget {budget_usd:g}: give dollars above 0")
    try:
        hours = choose.hours_of(deadline) if deadline else math.inf
    except (ValueError, KeyError) as error:
        raise ConfigError(f"--deadline {deadline!r}: write it as 90m, 24h or 3d") from error
    if not hours > 0:
        raise ConfigError(f"--deadline {deadline!r}: give more than no time")
    return hours, budget_usd or math.inf


def _second_group(
    recipe: Recipe, offers: list[cost.Offer], catalogs: Path, targets: list[str] | None
) -> bool:
    """Shows the machines of `sample`, where there are any. Returns whether the model fits them."""
    sampling = groups.sampling(recipe)
    if sampling is None or recipe.kind == "sample":
        return True
    found = hourly.of_groups(recipe, offers, catalogs, targets)
    left_out = cost.short_of_ram(sampling, catalogs, targets)
    return fleet_table.second_group(recipe, found, left_out, whole_plan.wide())


def _priced(offers: list[cost.Offer]) -> list[cost.Offer]:
    """The offers of machines for rent: those of your own are not chosen among."""
    return [offer for offer in offers if offer.usd is not None]


def with_measured(path: Path, planned: Callable[[], int]) -> int:
    """Plans with what a card showed, and says which of the plan's constants that changes. Raises
    ConfigError."""
    said = calibration.read(path)
    found = calibration.measured(said["figures"])
    if not found:
        raise ConfigError(f"{path} measures none of the plan's constants: it was cut short")
    off = [one for one in found if one.off or not one.believed]
    print(f"planned with what {said.get('device', 'a card')} showed, in {len(found)} constants")
    print(*(f"  {one}" for one in off), sep="\n")
    with calibration.calibrated(found):
        return planned()
