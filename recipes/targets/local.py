"""This machine: the same set-up and the same node launcher that a cloud node runs."""

from __future__ import annotations

from dataclasses import replace

from recipes.recipe.spec import Recipe
from recipes.targets import script


def render(recipe: Recipe) -> dict[str, str]:
    """One shell script, run in the repository. Here the machines of a second group are processes of one."""
    if recipe.jobs > 1:
        place = recipe.config.placement
        place = replace(place, workers_per_node=recipe.jobs * place.workers_per_node)
        recipe = replace(recipe, config=replace(recipe.config, placement=place))
    text = (
        f"#!/usr/bin/env bash\n# {recipe.name} on this machine: RUN_ID=... bash FILE, or `python3 launch.py"
        f" up {recipe.name} --target local`.\n"
        + script.preamble(recipe, "$PWD/.cache", runs="$PWD/runs")
        + script.setup_commands(recipe)
        + script.write_config(recipe)
        + f"exec {script.node_command(recipe)}\n"
    )
    return {f"{recipe.name}.sh": text}
