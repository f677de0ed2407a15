"""Task files of a recipe on a target, as `launch.py render` makes them."""

from __future__ import annotations

from recipes.drivers import task_files
from recipes.plan.resolving import resolve_groups
from recipes.recipe.spec import Recipe


def render(recipe: Recipe, target: str) -> dict[str, str]:
    return task_files.render(task_files.resolve_task(recipe, target))


def render_unchecked(recipe: Recipe, target: str) -> dict[str, str]:
    """Those of both groups, whether or not the target can run them."""
    return task_files.render(resolve_groups(recipe, target))
