"""Name and description of a recipe whose model or machines were changed: both say what runs, and not what it
was."""

from __future__ import annotations

import re
from dataclasses import replace

from recipes.recipe.spec import Recipe
from trainer.config.model_name import model_name

LONGEST = 36
"""Characters of a name that dstack takes."""


def with_new_name(recipe: Recipe, base: Recipe) -> Recipe:
    """`recipe`, made from `base` by overrides, under a name and a description of its own model and
    machines."""
    if recipe.kind != "train":
        return recipe
    before, now = model_name(base.config.model.path), model_name(recipe.config.model.path)
    if before != now:
        recipe = _of_model(recipe, before.removesuffix("-Instruct"), now.removesuffix("-Instruct"))
    was, shape = (f"({r.cluster.nodes} x {r.cluster.gpus_per_node})" for r in (base, recipe))
    return replace(recipe, description=recipe.description.replace(was, shape))


def _of_model(recipe: Recipe, before: str, now: str) -> Recipe:
    if before in recipe.description:
        description = recipe.description.replace(before, now)
    else:
        where = f"{recipe.cluster.nodes} x {recipe.cluster.gpus_per_node}"
        where = where if recipe.cluster.gpus_per_node else f"{recipe.config.placement.world_size} CPU ranks"
        description = f"{recipe.config.method.upper()} of {now} on {recipe.dataset.name} ({where})"

    name = recipe.name.replace(before.lower(), re.sub(r"[^a-z0-9.-]+", "-", now.lower()))
    if len(name) > LONGEST:
        name = recipe.name
    run = recipe.config.run
    if run.name == recipe.name:
        run = replace(run, name=name)
    return replace(recipe, name=name, description=description, config=replace(recipe.config, run=run))
