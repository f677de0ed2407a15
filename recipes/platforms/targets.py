"""Every target by its name; a recipe that one cannot run gets the name of a target that can."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from recipes.platforms import dstack, kubernetes, local, pbs, skypilot, slurm, ssh
from recipes.platforms.base import Platform
from recipes.recipe import sample_group
from recipes.recipe.spec import Recipe
from trainer.config import ConfigError

TARGETS: dict[str, Platform] = {
    target.name: target
    for target in (
        local.LOCAL,
        ssh.SSH,
        slurm.SLURM,
        pbs.PBS,
        *skypilot.TARGETS,
        *dstack.TARGETS,
        kubernetes.KUBERNETES,
        *skypilot.MORE_CLOUDS,
    )
}


def target_named(name: str) -> Platform:
    """The target of that name. Raises ConfigError naming the nearest one."""
    if name not in TARGETS:
        near = [other for other in TARGETS if name in other.split("-")]  # a cloud, which several reach
        near = near or difflib.get_close_matches(name, TARGETS, n=1, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(TARGETS)}"
        raise ConfigError(f"unknown target {name}: {hint}")
    return TARGETS[name]


def refusal(recipe: Recipe, target: str) -> str:
    """Why the target cannot run the recipe with all its groups of machines; empty if it can."""
    why = target_named(target).refusal(recipe)
    if why:
        return why
    sampling = sample_group.sampling_machines(recipe) if recipe.kind != "sample" else None
    if sampling is None or recipe.sample is None:
        return ""
    return target_named(recipe.sample.target or target).refusal(sampling)


def targets_for(recipe: Recipe) -> list[str]:
    """Targets that can run the recipe."""
    meant = recipe.targets or tuple(TARGETS)
    return [name for name in TARGETS if name in meant and not refusal(recipe, name)]


def check_target(recipe: Recipe, target: str) -> None:
    """Raises ConfigError where the target cannot run the recipe: why, and which can."""
    why = refusal(recipe, target)
    if not why and recipe.targets and target not in recipe.targets:
        why = f"{recipe.name} is not made for {target}"
    if why:
        others = nearest_targets(target, targets_for(recipe))
        if others:
            hint = f"use {' or '.join(others[:4])}"
        elif recipe.targets == (local.LOCAL.name,):
            hint = "it runs on this machine, --target local"
        else:
            hint = "no target can: change cluster.nodes, cluster.gpu or cluster.spot"
            hint += ", or those of sample" if recipe.sample else ""
        raise ConfigError(f"{why}: {hint}")


def nearest_targets(target: str, names: Iterable[str]) -> list[str]:
    """Targets to name instead of one, the nearest first."""
    unnamed = (target, local.LOCAL.name)
    others = [name for name in names if name not in unnamed and not TARGETS[name].chooses]
    return sorted(others, key=lambda name: _nearness(target, name))


def _nearness(target: str, other: str) -> tuple[bool, bool]:
    """Sorts alternatives: the same cloud first, then machines for rent, then your own."""
    cloud, theirs = target.partition("-")[2], other.partition("-")[2]
    return (cloud != theirs or not cloud, not TARGETS[other].cloud)
