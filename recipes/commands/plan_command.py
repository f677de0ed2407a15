"""`plan`: memory, disk, time and dollars of a recipe, and the choice of an offer under a deadline and a
budget."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from recipes import capabilities
from recipes.drivers import launching, uploads
from recipes.plan import (
    calibration,
    cheaper,
    cost,
    fleet_cost,
    hourly,
    memory,
    nearest_offer,
    offer_choice,
    prices,
    sizing,
    zero_stages,
)
from recipes.presets import resolve
from recipes.recipe import sample_group
from recipes.recipe.resolved import GIB, MemoryPlan
from recipes.recipe.spec import Recipe
from recipes.screens import fleet_screen, fleet_table, limits, plan_facts, plan_screen, whole_plan
from recipes.screens.plan_facts import PlanLimits
from trainer.config import ConfigError

Form = Literal["screen", "all", "json"]
"""One screen, every table, or facts for programs."""
Where = tuple[Path, list[str] | None]
"""SkyPilot's catalogs, and the targets that were asked for."""


def show_plan(
    name: str,
    target: str | None,
    overrides: list[str],
    deadline: str = "",
    budget_usd: float | None = None,
    network_gbit_s: float | None = None,
    form: Form = "screen",
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
        capabilities.check_target(recipe, target)
    where: Where = prices.sky_catalogs(), cost.target_members(recipe, target) if target else None
    offers = cost.offers(recipe, *where, ranges=True)
    kept = None
    if deadline or budget_usd:
        kept = _kept(name, overrides, recipe, offers, where, hours, usd)
    remarks = _of_workers(recipe, where)
    facts = _facts(recipe, offers, target, network_gbit_s, remarks, kept, where, proposed=form != "all")
    match form:
        case "json":
            print(json.dumps(asdict(facts), indent=2))
        case "screen":
            plan_screen.show_plan_screen(facts, plan_screen.narrow_console())
        case "all":
            console = whole_plan.wide_console()
            network = network_gbit_s or zero_stages.network_of(recipe, target)
            left_out = cost.short_of_ram(recipe, *where)
            whole_plan.show_whole_plan(recipe, offers, left_out, console, network, facts, target)
            print(*remarks, sep="\n", end="\n" if remarks else "")
            _second_group(recipe, offers, *where)
            if kept:
                print("", *kept.said, sep="\n")
    if kept:
        return 0 if kept.kept else 2
    return 2 if facts.problem else 0


def _facts(
    recipe: Recipe,
    offers: list[cost.Offer],
    target: str | None,
    network_gbit_s: float | None,
    remarks: list[str],
    kept: PlanLimits | None,
    where: Where,
    proposed: bool,
) -> plan_facts.PlanFacts:
    """The plan as facts. proposed: also what would make it cheaper, which takes a second."""
    need = memory.plan_memory(recipe)
    targets = where[1] or launching.driven_targets(recipe)
    taken = next((offer for offer in _priced(offers) if offer.target in targets), None)
    if target and taken is None:
        taken = next(iter(offers), None)
    network = network_gbit_s or zero_stages.network_of(recipe, taken.target if taken else target)
    better = []
    if proposed and need and taken:
        better = cheaper.cheaper_changes(recipe, need, taken, offers, targets, network, where[0])
    rates = []
    if recipe.kind != "train":
        rates = hourly.prices_of(recipe, where[1] or capabilities.targets_for(recipe), where[0])
    said = [recipe.dataset.guess] if recipe.dataset.guess and not recipe.config.run.max_steps else []
    said += _of_second_group(recipe, offers, where)
    if recipe.kind == "train" and need:
        advice = zero_stages.stage_advice(recipe, zero_stages.compare_stages(recipe, network), network)
        said += [advice] if advice else []
    said += [*remarks, *(f"left out: {line}" for line in cost.short_of_ram(recipe, *where))]
    return plan_facts.plan_facts(
        recipe, need, offers, taken, targets, target, better, rates, *_problem(recipe, need), said, kept
    )


def _problem(recipe: Recipe, need: MemoryPlan | None) -> tuple[str, str]:
    """Why it does not fit, and the cheapest change that makes it fit; "" twice where it does. need: the
    recipe's."""
    if need and not need.fits:
        return need.problem, sizing.advice(recipe)
    sampling = sample_group.sampling_machines(recipe) if recipe.kind != "sample" else None
    need = memory.plan_memory(sampling) if sampling else None
    if need and not need.fits:
        return f"the second group: {need.problem}", fleet_table.LARGER
    return "", ""


def _of_workers(recipe: Recipe, where: Where) -> list[str]:
    """Whose seconds the offers have, where rollout workers sample for the run."""
    if recipe.kind != "train":
        return []
    if recipe.config.fleet.gpus_per_node:
        return [fleet_table.own_nodes(recipe, fleet_cost.own_plan(recipe, *where))]
    if recipe.config.fleet.workers == "only":
        return [
            "rollout workers sample for this run: its hours and dollars above are those of engines on its own"
            " GPUs; `python3 launch.py plan RECIPE --fleet` has those with workers"
        ]
    return []


def _of_second_group(recipe: Recipe, offers: list[cost.Offer], where: Where) -> list[str]:
    """The machines of `sample` in a line: their memory, and what both groups cost an hour."""
    sampling = sample_group.sampling_machines(recipe)
    need = memory.plan_memory(sampling) if sampling else None
    if sampling is None or need is None or recipe.sample is None or recipe.kind == "sample":
        return []
    room = f"{need.peak.total / GIB:.1f} of {need.gpu_bytes / GIB:.1f} GiB a GPU"
    said = (
        f"second group: {sample_group.describe_machines(recipe.sample)}, {room}, "
        f"KV cache of {need.kv_cache_tokens:,} tokens"
    )
    rates = hourly.of_groups(recipe, offers, *where)
    if rates and rates[0].usd is not None:
        said += f"; both groups ${rates[0].usd:.2f} an hour on {rates[0].target} (--fleet: hours of both)"
    return [said]


def _kept(
    name: str,
    overrides: list[str],
    recipe: Recipe,
    offers: list[cost.Offer],
    where: Where,
    hours: float,
    usd: float,
) -> PlanLimits:
    """The offer that keeps a deadline and a budget, or what would."""
    asked = None if math.isinf(hours) else hours, None if math.isinf(usd) else usd
    chosen, judged = offer_choice.choose_offer(_priced(offers), hours, usd)
    if chosen:
        return PlanLimits(*asked, True, limits.describe_choice(recipe, chosen, judged, where[0]))

    def offers_of(changes: Sequence[str]) -> list[cost.Offer]:
        try:
            changed = resolve(name, [*overrides, *changes])
            return _priced(cost.offers(changed, *where, ranges=True))
        except ConfigError:  # its rows do not divide, say
            return []

    near = nearest_offer.describe_nearest(judged, hours, usd)
    need = memory.plan_memory(recipe)
    cures = [
        nearest_offer.other_nodes(recipe.cluster.nodes, offers_of, hours, usd),
        nearest_offer.in_pieces(recipe, need, offers_of, hours, usd) if need else None,
    ]
    return PlanLimits(*asked, False, limits.describe_no_choice(near, [cure for cure in cures if cure]))


def show_fleet_plan(
    name: str,
    target: str | None,
    overrides: list[str],
    deadline: str = "",
    budget_usd: float | None = None,
    form: Form = "screen",
) -> int:
    """Seconds and dollars of a step with and without rollout workers. Exit code 2 where the machines of
    `sample` are a loss, or nothing keeps the limits."""
    most = _limits(deadline, budget_usd)
    recipe = resolve(name, overrides)
    uploads.check_model_folder(recipe)
    if target:
        capabilities.check_target(recipe, target)
    found = fleet_cost.compare_fleets(recipe, prices.sky_catalogs(), [target] if target else None)
    if not (found.colocated or found.fleets):
        raise ConfigError("no price is known of machines that this recipe fits")
    facts = fleet_screen.fleet_facts(recipe, found, most)
    limited = bool(deadline or budget_usd)
    match form:
        case "json":
            print(json.dumps(asdict(facts), indent=2))
        case "screen":
            fleet_screen.show_fleet_screen(facts, plan_screen.narrow_console(), name, overrides)
        case "all":
            console = whole_plan.wide_console()
            fleet_table.show_fleets(recipe, found, console)
            if limited:
                fleet_table.show_choice(recipe, found, most, console, name, overrides)
    ends_well = facts.taken is not None if limited else facts.gain
    return 0 if ends_well else 2


def _limits(deadline: str, budget_usd: float | None) -> tuple[float, float]:
    """Hours and dollars, infinite where none are given. Raises ConfigError."""
    if budget_usd is not None and not budget_usd > 0:
        raise ConfigError(f"--budget {budget_usd:g}: give dollars above 0")
    try:
        hours = offer_choice.parse_hours(deadline) if deadline else math.inf
    except (ValueError, KeyError) as error:
        raise ConfigError(f"--deadline {deadline!r}: write it as 90m, 24h or 3d") from error
    if not hours > 0:
        raise ConfigError(f"--deadline {deadline!r}: give more than no time")
    return hours, budget_usd or math.inf


def _second_group(
    recipe: Recipe, offers: list[cost.Offer], catalogs: Path, targets: list[str] | None
) -> None:
    """Shows the machines of `sample`, where there are any."""
    sampling = sample_group.sampling_machines(recipe)
    if sampling is None or recipe.kind == "sample":
        return
    found = hourly.of_groups(recipe, offers, catalogs, targets)
    left_out = cost.short_of_ram(sampling, catalogs, targets)
    fleet_table.second_group(recipe, found, left_out, whole_plan.wide_console())


def _priced(offers: list[cost.Offer]) -> list[cost.Offer]:
    """The offers of machines for rent: those of your own are not chosen among."""
    return [offer for offer in offers if offer.usd is not None]


def with_measured(path: Path, planned: Callable[[], int]) -> int:
    """Plans with what a card showed, and says which of the plan's constants that changes. Raises
    ConfigError."""
    said = calibration.read_check(path)
    found = calibration.measured_constants(said["figures"])
    if not found:
        raise ConfigError(f"{path} measures none of the plan's constants: it was cut short")
    off = [one for one in found if one.off or not one.believed]
    device = said.get("device", "a card")
    # `--json` leaves standard output to the facts
    print(f"planned with what {device} showed, in {len(found)} constants", file=sys.stderr)
    print(*(f"  {one}" for one in off), sep="\n", file=sys.stderr)
    with calibration.calibrated(found):
        return planned()
