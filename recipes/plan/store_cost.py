"""Dollars of what leaves an object store for the machines of a run with rollout workers. Requests, $0.15 to
$0.17 a worker and day on S3, are left out."""

from __future__ import annotations

from recipes.platforms.targets import TARGETS
from recipes.recipe.spec import Recipe

EGRESS_USD_PER_GB = {"s3": 0.09, "gs": 0.12, "r2": 0.0, "file": 0.0}
"""List prices of what leaves a store for the internet, first tier, 2026."""
MUCH_EGRESS = 0.2
"""Share of a step's dollars from which on egress is warned of."""
STORE_CLOUD = {"s3": "aws", "gs": "gcp"}
"""The cloud whose machines read a store for nothing, in the bucket's own region."""


def scheme_of(recipe: Recipe) -> str:
    """The scheme of the recipe's bucket; s3 where none is named yet."""
    scheme = (recipe.storage.bucket or recipe.config.checkpoint.remote).partition("://")[0]
    return scheme if scheme in EGRESS_USD_PER_GB else "s3"


def egress_per_gb(recipe: Recipe, target: str) -> float:
    """Dollars of a gigabyte from the recipe's store to a target's machines; from S3 where no bucket is named
    yet."""
    scheme = scheme_of(recipe)
    if STORE_CLOUD.get(scheme) == TARGETS[target].cloud:
        return 0.0
    return EGRESS_USD_PER_GB[scheme]
