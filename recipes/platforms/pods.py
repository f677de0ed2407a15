"""Pods of a cluster of yours, whoever makes them: what they obey, their disk, their devices, their claim."""

from __future__ import annotations

from recipes.recipe.spec import Recipe

ENVIRONMENT_GIB = 60
"""Size of a pod's own disk where a claim holds models, data and runs: it has the environment, the repository
and Ray's files."""
OBEYS = frozenset({
    "cluster.shm_gib", "site.image_secret", "site.kubernetes_context", "site.node_pool", "site.queue",
    "site.rdma",
})  # fmt: skip
OF_CLAIMS = frozenset({"site.storage_class", "storage.volume_gib"})
"""Options of the claim that `storage.volume` names."""


def obeyed(recipe: Recipe) -> frozenset[str]:
    """Options of pods that the recipe's have an effect with."""
    return OBEYS | OF_CLAIMS if recipe.storage.volume else OBEYS


def own_disk_gib(recipe: Recipe) -> int:
    """Disk that a pod asks its node for: with a claim the data are there."""
    return ENVIRONMENT_GIB if recipe.storage.volume else recipe.cluster.disk_gib


def pull_secret(recipe: Recipe) -> dict[str, list[dict[str, str]]]:
    """A pod's field for the secret of its image's registry; {} without one."""
    name = recipe.site.image_secret
    return {"imagePullSecrets": [{"name": name}]} if name else {}


def rdma_devices(recipe: Recipe) -> dict[str, int]:
    """InfiniBand devices of a pod by the name of their resource; {} without any."""
    if not recipe.site.rdma:
        return {}
    name, _, count = recipe.site.rdma.rpartition(":")
    return {name: int(count)}


def claim_gib(recipe: Recipe) -> int:
    """Size of the claim at /workspace, or of another volume there."""
    return recipe.storage.volume_gib or recipe.cluster.disk_gib


def claim_mode(recipe: Recipe) -> str:
    """Who may write to the claim: all nodes at once, or one."""
    return "ReadWriteMany" if recipe.cluster.nodes > 1 else "ReadWriteOnce"
