"""Task files of a recipe on a target, as `launch.py render` makes them, and the commands of a launch."""

from __future__ import annotations

from recipes.drivers import task_files
from recipes.plan.resolving import resolve_groups
from recipes.platforms.base import Commands, LaunchGiven
from recipes.platforms.targets import target_named
from recipes.recipe.spec import Recipe
from recipes.records.run_record import RunRecord


def render(recipe: Recipe, target: str) -> dict[str, str]:
    return task_files.render(task_files.resolve_task(recipe, target))


def render_unchecked(recipe: Recipe, target: str) -> dict[str, str]:
    """Those of both groups, whether or not the target can run them."""
    return task_files.render(resolve_groups(recipe, target))


def launch_commands(
    record: RunRecord, files: list[str], env: dict[str, str], secrets: list[str], detach: bool
) -> Commands:
    return target_named(record.target).commands(record, LaunchGiven(files, env, secrets, detach))
