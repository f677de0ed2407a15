"""What SkyPilot, dstack and Kubernetes have in common: machines or containers that are thrown away."""

from __future__ import annotations

from recipes.platforms import script
from recipes.platforms.base import Platform
from recipes.recipe.spec import Recipe


class Disposable(Platform):
    disposable = True

    OBEYS = frozenset(
        {"cluster.cpus", "cluster.memory_gib", "cluster.disk_gib", "cluster.image", "storage.volume"}
    )

    def begin_shell(self, recipe: Recipe, work: str = "/workspace") -> str:
        """What the shell of its tasks begins with. work: where data and runs go, as a shell expression."""
        return script.preamble(
            recipe,
            work,
            asks_bucket=recipe.uses_bucket,
            data=script.data_directory(recipe),
            kept_folder=self.kept_folder(recipe),
        )
