"""What Slurm and PBS have in common: jobs that are submitted where all nodes see the repository."""

from __future__ import annotations

from recipes.platforms.base import Platform
from recipes.recipe.spec import Recipe


class Batch(Platform):
    shared_files = True

    OBEYS = frozenset(
        {
            "cluster.cpus",
            "cluster.memory_gib",
            "budget.max_requeues",
            "site.shared_dir",
            "site.partition",
            "site.account",
            "site.walltime_hours",
            "site.offline",
        }
    )


def work_folder(recipe: Recipe) -> str:
    """Where environment, data and models go, as a shell expression."""
    return recipe.site.shared_dir or "$PWD/.cache"


def runs_folder(recipe: Recipe) -> str:
    """Where runs go, as a shell expression."""
    return "$WORK/runs" if recipe.site.shared_dir else "$PWD/runs"
