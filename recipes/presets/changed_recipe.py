"""A recipe that overrides have changed: its name, description and promises say what runs, and not what it
was."""

from __future__ import annotations

import re
from dataclasses import replace

from recipes.recipe.spec import Recipe
from trainer.config import Expected
from trainer.config.run_store import model_name

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


def without_old_promises(recipe: Recipe, base: Recipe) -> Recipe:
    """`recipe`, made from `base` by overrides, without the promises that no longer concern it.

    Another model, another teacher or other data is another run. On other machines seconds and memory are
    others. Whatever else is changed, a learning rate say, is what the bands are there to catch.
    """
    config, before = recipe.config, base.config
    if config.expected != before.expected:
        return recipe
    same_model = config.model.path == before.model.path
    same_teacher = config.algorithm.teacher == before.algorithm.teacher
    same_data = (config.data.path, config.data.source) == (before.data.path, before.data.source)
    if not (same_model and same_teacher and same_data):
        return replace(recipe, config=replace(config, expected=Expected()))
    if recipe.cluster == base.cluster:
        return recipe
    kept = [band for band in config.expected.bands if not band.metric.startswith(("time/", "perf/", "cost/"))]
    expected = replace(config.expected, bands=tuple(kept))
    return replace(recipe, config=replace(config, expected=expected))
