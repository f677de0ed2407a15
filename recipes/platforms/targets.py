"""Every target by its name; a recipe that one cannot run gets the name of a target that can. An option of
`cluster`, `budget`, `site` or `storage` that would do nothing is refused where the files are written: a limit
that nobody holds is worse than none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import fields

from recipes.platforms import dstack, kubernetes, local, pbs, skypilot, slurm, ssh
from recipes.platforms.base import Platform
from recipes.presets import RECIPES
from recipes.recipe import sample_group
from recipes.recipe.spec import Budget, Cluster, Recipe, Site, StorageSite
from trainer.config import ConfigError

SECTIONS = {"cluster": Cluster, "budget": Budget, "site": Site, "storage": StorageSite}
EVERYWHERE = {
    "cluster.nodes", "cluster.gpus_per_node", "cluster.gpu", "cluster.alternatives", "cluster.spot",
    "budget.max_hours", "budget.max_restarts", "budget.max_losses", "site.prelude", "storage.bucket",
    "storage.weights",
}  # fmt: skip
"""Options that have their effect on every target: in the plan, in what it can run, or in the run's
configuration, which the head obeys."""
LIMITED = frozenset(
    f"{name}.{field.name}" for name, section in SECTIONS.items() for field in fields(section)
) - frozenset(EVERYWHERE)
"""All others: each platform says which of them it obeys."""
OF_GROUP = ("partition", "constraint", "gres", "node_pool")
"""Options of `site` that the second group has for itself."""
OF_THE_RUN = ("site.constraint", "site.gres", "site.node_pool", "site.hosts", "site.rdma", "storage.volume",
              "storage.volume_gib")  # fmt: skip
"""Options that the second group does not take over from the run's own machines
(`sample_group.sampling_machines`)."""

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


def is_obeyed(recipe: Recipe, target: str, option: str) -> bool:
    """Whether the target does what an option says: `budget.idle_minutes`."""
    return option not in LIMITED or option in target_named(target).obeys(recipe)


def check_options(recipe: Recipe, target: str) -> None:
    """Raises ConfigError for an option that the target does not obey, with the targets that do. What a
    preset asks for itself holds where it can. recipe: as it was written, before it was resolved."""
    sample = recipe.sample if recipe.kind != "sample" else None
    view = sample_group.sampling_machines(recipe) if sample else None
    there = (sample.target or target) if sample else target
    section = sample_group.group_section(recipe)
    for option, value in _given_options(recipe, SECTIONS):
        if is_obeyed(recipe, target, option):
            continue
        of_both = not option.startswith("cluster.") and option not in OF_THE_RUN
        if view and of_both and is_obeyed(view, there, option):
            continue
        own = ""
        name = option.removeprefix("site.")
        if view and name in OF_GROUP:
            own = f"; machines that sample have sample.{name}"
        raise ConfigError(_refused(recipe, target, option, option.replace("cluster", section), value) + own)
    if sample is None or view is None:
        return
    for option, value in _given_options(view, ("cluster",)):
        if not is_obeyed(view, there, option):
            raise ConfigError(_refused(view, there, option, option.replace("cluster", "sample"), value))
    for name in OF_GROUP:
        value = getattr(sample, name)
        if value and not is_obeyed(view, there, f"site.{name}"):
            raise ConfigError(_refused(view, there, f"site.{name}", f"sample.{name}", value))


def _given_options(recipe: Recipe, sections: Iterable[str]) -> Iterator[tuple[str, object]]:
    """Options that have another value than their default, and than the recipe's preset gives them. A second
    group has the image of the run's own machines where it names none."""
    name = sample_group.run_name(recipe)
    preset = RECIPES[name]() if name in RECIPES else None
    inherits = recipe.kind == "sample" and not (recipe.sample and recipe.sample.image)
    for section in sections:
        own = getattr(recipe, section)
        of_preset = sample_group.group_section(recipe) if section == "cluster" else section
        given = getattr(preset, of_preset) if preset else None
        for field in fields(own):
            value = getattr(own, field.name)
            if section == "cluster" and field.name == "image" and inherits:
                continue
            if value != field.default and value != getattr(given, field.name, field.default):
                yield f"{section}.{field.name}", value


def _refused(recipe: Recipe, target: str, option: str, shown: str, value: object) -> str:
    able = [name for name in TARGETS if not refusal(recipe, name) and is_obeyed(recipe, name, option)]
    able = nearest_targets(target, able) or able
    hint = f", or use {' or '.join(able[:4])}" if able else ""
    text = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return f"{shown} is {text}, and {target} does nothing with it: leave it out{hint}"
