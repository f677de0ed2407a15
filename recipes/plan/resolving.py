"""Makes a `ResolvedRecipe`: the one place where a recipe meets a target, its memory plan and its machines."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from recipes.plan import cost, memory, offer_choice
from recipes.platforms.targets import check_target, target_named
from recipes.recipe import sample_group
from recipes.recipe.resolved import Expectation, MachineChoice, ResolvedRecipe
from recipes.recipe.spec import Recipe, validate
from trainer.config import ConfigError


def resolve_target(recipe: Recipe, target: str) -> ResolvedRecipe:
    """The recipe on a target, both groups of its machines. Raises ConfigError where it is not valid, or the
    target cannot run it: why, and which can."""
    validate(recipe)
    check_target(recipe, target)
    group = recipe.sample if recipe.kind != "sample" else None
    if group and (why := sample_group.nothing_to_sample(recipe)):
        raise ConfigError(why)
    return resolve_groups(recipe, target)


def resolve_groups(recipe: Recipe, target: str) -> ResolvedRecipe:
    """Both groups of a recipe that was checked. A group is a job of its own: a SkyPilot job group would keep
    both in one place and wait for all of them."""
    if recipe.kind == "sample":
        return _resolved(recipe, target)
    if target_named(target).shared_files and recipe.cluster.nodes > 1 and recipe.saves:
        saving = replace(recipe.config.checkpoint, shared_files=True)  # so that the bucket may be left out
        recipe = replace(recipe, config=replace(recipe.config, checkpoint=saving))
    run = _resolved(recipe, target)
    view = sample_group.sampling_machines(recipe)
    if view is None or recipe.sample is None:
        return run
    return replace(run, sampling=_resolved(view, recipe.sample.target or target))


def _resolved(recipe: Recipe, target: str) -> ResolvedRecipe:
    recipe = memory.with_resources(recipe)
    return ResolvedRecipe(
        recipe=recipe,
        target=target,
        memory=memory.plan_memory(recipe),
        machines=possible_machines(recipe, target),
    )


def possible_machines(recipe: Recipe, target: str) -> tuple[MachineChoice, ...]:
    """What a target may be asked for, in order of what the run is expected to cost there, preemptions and
    restarts included (what trains nothing: per hour); then those whose price or memory is not known, spot
    before on-demand."""
    names = cost.target_members(recipe, target)
    expected = _expected_usd(recipe, names)
    machines = []
    for name in names:
        for gpu in target_named(name).gpus_for(recipe) if recipe.cluster.gpus_per_node else [""]:
            listed = cost.listed_usd(recipe, name, gpu)
            for spot in cost.markets(recipe, name):
                usd = expected.get((name, gpu, spot))
                machines.append(MachineChoice(name, gpu, spot, usd, listed))
    return tuple(sorted(machines, key=lambda row: (math.inf if row.usd is None else row.usd, not row.spot)))


def _expected_usd(recipe: Recipe, targets: list[str]) -> dict[tuple[str, str, bool], float]:
    """Expected dollars by target, GPU and market."""
    known = {}
    if recipe.kind == "train":
        for offer in cost.offers(recipe, targets=targets):
            if offer.usd is not None:
                known[offer.target, offer.gpu, offer.spot] = offer.usd
        return known
    for name in targets:
        for usd, gpu, spot in cost.node_prices(recipe, name):
            known[name, gpu, spot] = usd
    return known


def expect_run(run: ResolvedRecipe, catalogs: Path) -> Expectation:
    """What a launch is expected to take at the prices of this machine: the cheapest offer of those that are
    known."""
    recipe = run.recipe
    targets = cost.target_members(recipe, run.target)
    offers = cost.offers(recipe, catalogs, targets, ranges=True)
    offer = next((offer for offer in offers if offer.usd_per_hour), None)
    usd_per_hour = offer.usd_per_hour if offer else None
    if usd_per_hour is None:
        prices = cost.node_prices(recipe, run.target, catalogs)
        usd_per_hour = prices[0][0] * recipe.cluster.nodes * recipe.jobs if prices else 0.0
    if offer is None or recipe.config.fleet.gpus_per_node:  # half of the GPUs sample: no such time is planned
        return Expectation(usd_per_hour)
    judged = offer_choice.judge_offer(offer, math.inf, math.inf)
    likely_usd = judged.median * usd_per_hour
    return Expectation(usd_per_hour, likely_usd, judged.median, judged.usd or 0.0, judged.hours)
