"""Dollars that an object store takes of a run with rollout workers: what leaves it, and requests."""

from __future__ import annotations

from recipes.platforms.targets import TARGETS
from recipes.recipe.spec import Recipe

EGRESS_USD_PER_GB = {"s3": 0.09, "gs": 0.12, "r2": 0.0, "file": 0.0}
"""List prices of what leaves a store for the internet, first tier, 2026."""
MUCH_EGRESS = 0.2
"""Share of a step's dollars from which on egress is warned of."""
STORE_CLOUD = {"s3": "aws", "gs": "gcp"}
"""The cloud whose machines read a store for nothing, in the bucket's own region."""
REQUEST_USD = {"s3": (5e-6, 4e-7), "gs": (5e-6, 4e-7), "r2": (4.5e-6, 3.6e-7), "file": (0.0, 0.0)}
"""List prices of a request that writes or lists, and of one that reads, 2026."""
WRITES_S, READS_S = 0.2, 1.8
"""Requests of a worker in a second, and of the trainer for it: a heartbeat every 5 s, which is read every
second; every 5 s head and mail, and every 15 s six objects that a newer attempt would change."""
UNIT_WRITES = 4
"""Those of a unit: its mail, the heartbeats at its begin and end, its samples. One is read."""


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


def requests_usd(request_usd: tuple[float, float], worker_s: float, units: int) -> float:
    """Dollars of requests. request_usd: of one that writes, and of one that reads. worker_s: seconds that
    workers live, all added up. units: those that they sample meanwhile."""
    write, read = request_usd
    return worker_s * (WRITES_S * write + READS_S * read) + units * (UNIT_WRITES * write + read)
