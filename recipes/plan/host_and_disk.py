"""Bytes of a node besides its GPUs, by what takes them: host memory, and disk."""

from __future__ import annotations

from recipes.plan import hub_config
from recipes.plan.activations import dtype_bytes
from recipes.recipe.resolved import GIB
from recipes.recipe.spec import Recipe
from trainer.config import RunConfig
from trainer.config.budget import checkpoints_bytes, downloaded_bytes, policy_bytes, trained
from trainer.hardware.host_memory import worker_bytes
from trainer.hardware.model_shapes import Shape

HOST_SYSTEM = 8 * GIB
"""Ray, graders and the system, and one more GiB per GPU."""
SERVER = 16 * GIB
"""vLLM's server and its front end, and one more GiB per GPU (planning figure)."""
ENVIRONMENT_DISK = 25 * GIB
"""Locked environment, uv's cache, image layers."""
SPILL_DISK = 20 * GIB
"""Ray's session, spill and logs."""


def has_engines(config: RunConfig) -> bool:
    """Whether the trainer's own GPUs have engines."""
    return config.method == "grpo" and config.fleet.workers != "only"


def without_zeros(parts: dict[str, float]) -> dict[str, float]:
    """The parts that take anything."""
    return {name: value for name, value in parts.items() if value}


def sampling_host(recipe: Recipe, shape: Shape) -> dict[str, float]:
    """Host memory of a machine that only samples: each of its engines has a copy of the weights there, into
    which new ones arrive."""
    config = recipe.config
    gpus = recipe.cluster.gpus_per_node
    engines = max(1, gpus // config.rollout.tensor_parallel)
    parts = {
        "system": HOST_SYSTEM + gpus * GIB,
        "worker processes": float(gpus * worker_bytes("cuda", config.data.image_cache_gib)),
        "each worker's copy of the weights": float(engines * shape.parameters * dtype_bytes(config)),
    }
    return without_zeros(parts)


def training_host(recipe: Recipe, shape: Shape) -> dict[str, float]:
    """Host memory of a node that trains."""
    config = recipe.config
    nodes = recipe.cluster.nodes
    gpus = recipe.cluster.gpus_per_node
    ranks = config.placement.workers_per_node
    width = dtype_bytes(config)
    t = trained(config, shape)
    samples = has_engines(config)
    parts = {
        "system, Ray, graders": HOST_SYSTEM + gpus * GIB,
        "worker processes": gpus * worker_bytes(config.placement.device, config.data.image_cache_gib),
    }
    # DeepSpeed's CPU optimizer holds fp32 gradients beside the states. Else gradients are freed, not moved
    # (trainer/learning/zero/offload.py).
    if config.optimizer.offload_optimizer:
        parts["optimizer states"] = t * (12 + 4) / nodes
    elif samples:
        parts["ZeRO-3 states while the engine is awake"] = t * 12 / nodes
    if config.optimizer.zero_stage < 3 or config.lora.qlora:
        parts["weights that every rank loads"] = policy_bytes(config, shape) * ranks
    parts["checkpoint being written"] = 12.0 * t / nodes
    if config.optimizer.offload_reference:
        frozen = hub_config.teacher_shape(config) or shape
        parts["reference shards"] = frozen.parameters * width / nodes
    if config.rollout.sleep_level == 1 and samples:
        engine = shape.parameters * width * ranks / config.rollout.tensor_parallel
        parts["engine weights at sleep level 1"] = engine
    if own := config.fleet.gpus_per_node:
        engines = own // config.rollout.tensor_parallel
        parts["each worker's copy of the weights"] = engines * shape.parameters * width
    if config.fleet.workers != "off":
        parts["shards as rollout workers have them"] = t * width / nodes
    return without_zeros(parts)


def disk(recipe: Recipe, shape: Shape) -> dict[str, float]:
    """Disk of a node."""
    config = recipe.config
    trains = recipe.kind == "train"
    together = not trains or bool(recipe.storage.volume) or config.checkpoint.shared_files
    model = shape.parameters * 2.0
    parts = {"environment": ENVIRONMENT_DISK, "model download": downloaded_bytes(config, model, together)}
    teacher = hub_config.teacher_shape(config) if trains else None
    if teacher:
        parts["teacher download"] = downloaded_bytes(config, teacher.parameters * 2.0, together)
    if recipe.storage.weights:
        parts["weights of another run"] = model
    parts["data"] = recipe.dataset.disk_gib * GIB
    if trains:
        parts["checkpoints"] = float(checkpoints_bytes(config, trained(config, shape)))
        if config.checkpoint.export_hf != "never":
            parts["exported weights"] = 2.0 * trained(config, shape) if config.lora.rank else model
    if recipe.kind != "sample":
        parts["Ray session and logs"] = SPILL_DISK
    return without_zeros(parts)
