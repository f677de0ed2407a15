"""The recipes: small functions that return one. `RECIPES` maps each name to its function.

Lives here: a file for each family of recipes, the parts that they share, and what a recipe becomes with
data of your own.
In: a name and overrides. Out: a validated `Recipe`.
May import: `recipes.recipe` and the trainer's configuration.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import replace

from recipes.presets import (
    as_published,
    demo,
    fine_tuning,
    own_data,
    reinforcement,
    without_training,
)
from recipes.recipe import recipe_files, sample_group
from recipes.recipe.spec import Recipe, override, validate, with_placement
from trainer.config import ConfigError, Expected
from trainer.config.bucket_address import BucketAddress
from trainer.config.run_store import model_name
from trainer.hardware import model_shapes

LONGEST = 36
"""Characters of a name that dstack takes."""
RECIPES: dict[str, Callable[[], Recipe]] = {
    **demo.RECIPES,
    **reinforcement.RECIPES,
    **as_published.RECIPES,
    **fine_tuning.RECIPES,
    **without_training.RECIPES,
}


def get(name: str) -> Recipe:
    """The recipe of that name, or of `file.py:function`. Raises ConfigError naming the nearest one."""
    if recipe_files.is_python(name):
        recipe = with_placement(recipe_files.from_python(name))
        validate(recipe)
        return recipe
    if name not in RECIPES:
        near = [known for known in RECIPES if name and known.startswith(name)]
        # A model's name is in several: GRPO is what this project is for, and it comes first.
        held = [known for known in RECIPES if len(name) > 3 and name.lower() in known]
        if held and not near:
            held.sort(key=lambda known: not known.startswith("grpo"))
            raise ConfigError(f"unknown recipe {name}: it is part of {', '.join(held[:6])}")
        if "/" in name and model_shapes.is_hub_id(name):
            raise ConfigError(
                f"{name} is a model, and here stands a recipe's name: give a recipe of a model of its kind"
                f" (`python3 launch.py list`) and --set model.path={name}"
            )
        near = near or difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "see `python3 launch.py list`"
        if len(near) > 1:
            hint = f"it is the beginning of {', '.join(near)}"
        raise ConfigError(f"unknown recipe {name}: {hint}")
    recipe = with_placement(RECIPES[name]())
    if recipe.name != name:
        raise ConfigError(f"recipe {name} calls itself {recipe.name}: make the two agree in recipes/presets")
    validate(recipe)
    return recipe


def resolve(name: str, overrides: list[str]) -> Recipe:
    """The recipe of that name with its overrides, validated; with `fleet.run` one machine that samples for
    that run."""
    base = get(name)
    recipe = own_data.with_own_rows(override(base, overrides), overrides)
    if base.cluster.gpus_per_node and not recipe.cluster.gpus_per_node:
        if not recipe.setup:
            raise ConfigError(
                f"cluster.gpus_per_node is 0, and {name} is made for GPUs: give 1 or more, or setup=cpu"
                " besides for a try-out on CPU ranks, one a node"
            )
        one_rank = replace(recipe.config.placement, workers_per_node=1)
        recipe = with_placement(replace(recipe, config=replace(recipe.config, placement=one_rank)))
    recipe = with_new_name(recipe, base)
    recipe = without_old_promises(recipe, base)
    validate(recipe)
    if recipe.storage.bucket:
        # keys are joined to it with one slash
        bucket = BucketAddress.parse(recipe.storage.bucket, "storage.bucket")
        recipe = replace(recipe, storage=replace(recipe.storage, bucket=bucket.url))
    return sample_group.worker_machine(recipe) if recipe.config.fleet.run else recipe


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
