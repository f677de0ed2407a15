"""`plan`: memory, disk, time and dollars of a recipe, and the choice of an offer under a deadline and a
budget."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import asdict
from typing import Literal

from recipes.drivers import uploads
from recipes.plan import cost, fleet_cost, offer_choice, prices
from recipes.platforms.targets import check_target
from recipes.presets import resolve
from recipes.screens import fleet_screen, limits, plan_facts, plan_screen, tables
from recipes.screens.plan_facts import Where
from trainer.config import ConfigError

Form = Literal["screen", "all", "json"]
"""One screen, every table, or facts for programs."""


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

    network_gbit_s: between nodes, as it was measured; None: the targets'.
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
        check_target(recipe, target)
    where: Where = prices.sky_catalogs(), cost.target_members(recipe, target) if target else None
    offers = cost.offers(recipe, *where, ranges=True, network_gbit_s=network_gbit_s)
    kept = None
    if deadline or budget_usd:

        def offers_of(change: str) -> list[cost.Offer]:
            try:
                changed = resolve(name, [*overrides, change])
                return _priced(cost.offers(changed, *where, ranges=True, network_gbit_s=network_gbit_s))
            except ConfigError:  # its rows do not divide, say
                return []

        kept = limits.keep_limits(recipe, _priced(offers), hours, usd, where[0], offers_of)
    plan = plan_facts.make_plan(recipe, offers, target, where, network_gbit_s, kept)
    match form:
        case "json":
            print(json.dumps(asdict(plan[0]), indent=2))
        case "screen":
            plan_screen.show_plan(plan, tables.narrow_console())
        case "all":
            plan_screen.show_plan(plan, tables.wide_console(), whole=True)
    if kept:
        return 0 if kept.kept else 2
    return 2 if plan[0].problem else 0


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
    if form == "json":
        raise ConfigError("--fleet is a screen: leave --json out, or add --all for every row")
    most = _limits(deadline, budget_usd)
    recipe = resolve(name, overrides)
    uploads.check_model_folder(recipe)
    if target:
        check_target(recipe, target)
    compared = fleet_cost.compare_fleets(recipe, prices.sky_catalogs(), [target] if target else None)
    if not (compared.colocated or compared.fleets):
        raise ConfigError("no price is known of machines that this recipe fits")
    command = " ".join([name, *(f"--set {shlex.quote(override)}" for override in overrides)])
    console = tables.wide_console() if form == "all" else tables.narrow_console()
    fleet_screen.show_fleets(recipe, compared, most, console, command, whole=form == "all")
    if deadline or budget_usd:
        return 0 if compared.taken(*most) else 2
    return 0 if fleet_screen.is_gain(recipe, compared) else 2


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


def _priced(offers: list[cost.Offer]) -> list[cost.Offer]:
    """The offers of machines for rent: those of your own are not chosen among."""
    return [offer for offer in offers if offer.usd is not None]
