"""This machine: the same set-up and the same node launcher that a cloud node runs."""

from __future__ import annotations

from dataclasses import replace

from recipes.platforms import clouds, script
from recipes.platforms.base import Commands, LaunchGiven, Platform
from recipes.recipe.resolved import ResolvedRecipe
from recipes.recipe.spec import Recipe
from recipes.records.run_record import RunRecord


class Local(Platform):
    program = "bash"
    title = "`bash`"
    hint = "install bash"
    shared_files = True
    runs_here = True
    driven_from_here = True

    def render(self, run: ResolvedRecipe) -> dict[str, str]:
        """One shell script, run in the repository. Here the machines of a second group are processes of
        one."""
        recipe = run.recipe
        if recipe.jobs > 1:
            place = recipe.config.placement
            place = replace(place, workers_per_node=recipe.jobs * place.workers_per_node)
            recipe = replace(recipe, config=replace(recipe.config, placement=place))
        command = f"python3 launch.py up {recipe.name} --target local"
        text = (
            f"#!/usr/bin/env bash\n# {recipe.name} on this machine: RUN_ID=... bash FILE, or `{command}`.\n"
            + script.preamble(recipe, "$PWD/.cache", runs="$PWD/runs")
            + script.setup_commands(recipe)
            + script.write_config(recipe)
            + f"exec {script.node_command(recipe)}\n"
        )
        return {f"{recipe.name}.sh": text}

    def commands(self, record: RunRecord, given: LaunchGiven) -> Commands:
        return self.own_commands(record, given, has_status=False)

    def refusal(self, recipe: Recipe) -> str:
        if recipe.cluster.nodes == 1 and recipe.jobs > 1 and recipe.cluster.gpus_per_node:
            return (
                f"{self.name} is one machine, and {recipe.name} wants {recipe.jobs}: set sample.gpus_per_node"
            )
        return super().refusal(recipe)


LOCAL = Local(
    name="local",
    gpus=clouds.ANY,
    network_gbit_s={"": 0},
    note="this machine, the same set-up and node launcher",
)
