"""Bytes: per GPU and phase, per host, on disk. Arithmetic from the model's shape; every constant says where
it is from.

What stands where, by phase (trainer/learning/policy.py and trainer/sampling are the code that this
describes):

    load      weights arrive in shards (below ZeRO-3 whole), the fp32 master copy is made
    rollout   ZeRO-3's states are in host memory, the engine holds its weights and KV cache
    logprobs  engine asleep; forward passes over gathered layers
    update    the same, with gradients, saved activations and the optimizer's step
    sync      policy's shards beside the engine's weights, and one bucket of gathered layers between them
    save      copies for the checkpoint are made in host memory; the GPU holds the states
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from recipes.plan import activations, hub_config
from recipes.spec import Recipe, override, placed, validate
from trainer.config import ConfigError, RunConfig
from trainer.config.budget import (
    CHECKPOINT_BYTES_PER_PARAMETER,
    NF4_SCALES,
    SUB_GROUP,
    checkpoints_bytes,
    downloaded,
    linear_weights,
    logprob_tokens,
    policy_bytes,
    prefetch_parameters,
    trained,
)
from trainer.hardware import adapters
from trainer.hardware.gpus import gpu_named
from trainer.hardware.host_memory import worker_bytes
from trainer.hardware.model_shapes import Shape

GIB = 2**30
CONTEXT = 1.5 * GIB
"""CUDA context and cuBLAS workspaces of one process (planning figure, not measured)."""
COMMUNICATORS = 1.0 * GIB
"""NCCL's buffers where there is more than one rank: three or four communicators, of all ranks, of vLLM's
world and of its tensor-parallel ranks (planning figure, not measured)."""
ENGINE_WORKSPACE = 3.0 * GIB
"""What an engine takes inside its share while awake: the tower's and the logits' activations, sampler tables,
CUDA graphs (computed for 256 sequences, not measured)."""
ENGINE_ASLEEP = 1.5 * GIB
"""What stays of an engine at sleep level 2: CUDA graphs, input buffers, token tables (planning figure, not
measured)."""
MOST_OF_A_CARD = 0.9
"""Share of a GPU that a recipe of ours may plan: the rest is for what fragments (a choice, not measured)."""
REDUCE_BUCKET = 500_000_000
"""DeepSpeed's reduce_bucket_size, elements of the gradient dtype."""
PERSISTENT = 100_000
"""DeepSpeed's stage3_param_persistence_threshold: parameters of fewer elements stay whole on every rank."""
HOST_SYSTEM = 8 * GIB
"""Ray, graders and the system, and one more GiB per GPU."""
SERVER = 16 * GIB
"""vLLM's server and its front end, and one more GiB per GPU (planning figure)."""
ENVIRONMENT_DISK = 25 * GIB
"""Locked environment, uv's cache, image layers."""
SPILL_DISK = 20 * GIB
"""Ray's session, spill and logs."""


@dataclass(frozen=True)
class Phase:
    """Peak of one phase on one GPU, by what it is made of; bytes."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    shape: Shape
    gpu: str
    gpu_bytes: float
    phases: list[Phase]
    kv_cache_tokens: int
    """Tokens that one engine's KV cache holds."""
    host: dict[str, float]
    shm_bytes: float
    disk: dict[str, float]
    checkpoint_bytes: float
    """One whole checkpoint, all ranks."""

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether every phase fits, and the KV cache takes at least one longest sequence."""
        return self.problem == ""

    @property
    def problem(self) -> str:
        """Why it does not fit; empty if it does."""
        if any(phase.name == "rollout" for phase in self.phases) and self.kv_cache_tokens <= 0:
            return "the engine's share of memory leaves nothing for the KV cache"
        if self.peak.total > self.gpu_bytes:
            return f"{self.peak.name} needs {self.peak.total / GIB:.1f} GiB of {self.gpu_bytes / GIB:.1f} GiB"
        return ""

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())

    @property
    def disk_bytes(self) -> float:
        return sum(self.disk.values())


def plan(recipe: Recipe, gpu: str = "") -> MemoryPlan | None:
    """The memory of a recipe on its GPU (or another); None where there is no GPU or no model to speak of."""
    gpu = gpu or recipe.cluster.gpu
    if recipe.kind in ("preflight", "check") or not recipe.cluster.gpus_per_node:
        return None
    shape = hub_config.shape(recipe.config.model)
    if shape is None or (recipe.config.teaches and hub_config.teacher(recipe.config) is None):
        return None
    config, gpus = recipe.config, recipe.cluster.gpus_per_node
    gpu_bytes = gpu_named(gpu).memory_gib * GIB
    engine_bytes = config.rollout.gpu_memory_utilization * gpu_bytes
    weights = shape.parameters * _width(config) / config.rollout.tensor_parallel
    kv_bytes = engine_bytes - weights - ENGINE_WORKSPACE
    per_token = _cached_bytes(config, shape)
    match recipe.kind:
        case "train":
            peaks, host = phases(config, shape, engine_bytes), _host(recipe, shape)
        case "sample":
            peaks, host = [_sampling(config, weights, engine_bytes)], _sampling_host(recipe, shape)
        case _:
            peaks = [_serving(weights, engine_bytes)]
            host = {"system": HOST_SYSTEM, "server": SERVER + gpus * GIB}
    return MemoryPlan(
        shape=shape,
        gpu=gpu,
        gpu_bytes=gpu_bytes,
        phases=peaks,
        kv_cache_tokens=int(kv_bytes / per_token) if kv_bytes > 0 else 0,
        host=host,
        shm_bytes=(8 + 2 * recipe.cluster.gpus_per_node) * GIB,
        disk=_disk(recipe, shape),
        checkpoint_bytes=(
            float(CHECKPOINT_BYTES_PER_PARAMETER * trained(config, shape)) if recipe.kind == "train" else 0.0
        ),
    )


def _cached_bytes(config: RunConfig, shape: Shape) -> float:
    """What an engine's rank caches for a token, with the token's share of the longest sequence's states."""
    ranks = config.rollout.tensor_parallel
    keys = shape.kv_bytes_per_token(_width(config)) / min(ranks, shape.kv_heads)
    return keys + shape.state_bytes(_width(config)) / ranks / config.longest_sequence


def _serving(weights: float, engine_bytes: float) -> Phase:
    cache = max(0.0, engine_bytes - weights)
    return Phase("serve", {"CUDA context": CONTEXT, "engine weights": weights, "engine KV cache": cache})


def _sampling(config: RunConfig, weights: float, engine_bytes: float) -> Phase:
    """The one phase of a machine that only samples: its engine never sleeps, and no state of training is
    there."""
    parts = {"CUDA context": CONTEXT, "engine weights": weights, "engine workspace": ENGINE_WORKSPACE}
    if config.rollout.tensor_parallel > 1:
        parts["NCCL's communicators"] = COMMUNICATORS
    cache = max(0.0, engine_bytes - weights - ENGINE_WORKSPACE)
    return Phase("rollout", parts | {"engine KV cache": cache})


def _sampling_host(recipe: Recipe, shape: Shape) -> dict[str, float]:
    """Host memory of a machine that samples; new weights arrive in a copy that all its engines read."""
    config, gpus = recipe.config, recipe.cluster.gpus_per_node
    return {
        "system": HOST_SYSTEM + gpus * GIB,
        "worker processes": float(gpus * worker_bytes("cuda", config.data.image_cache_gib)),
        "copy of the weights": float(shape.parameters * _width(config)),
    }


def _width(config: RunConfig) -> int:
    return 2 if config.model.dtype == "bf16" else 4


def _gradient_width(config: RunConfig) -> int:
    return 4 if config.optimizer.grad_accum_dtype == "fp32" else _width(config)


def phases(config: RunConfig, shape: Shape, engine_bytes: float) -> list[Phase]:
    """All phases of one rank. `engine_bytes` is the engine's share of the GPU while awake."""
    world, width = config.placement.world_size, _width(config)
    p = shape.parameters
    t = trained(config, shape)
    lora = config.lora
    adapter = adapters.sizes(shape, lora.rank, lora.vision)
    stage = config.optimizer.zero_stage
    whole = policy_bytes(config, shape) + sum(adapter) * width
    shard = whole / (world if stage == 3 else 1)
    master, adam = 4.0 * t / world, 8.0 * t / world
    if config.optimizer.offload_optimizer:
        master = adam = 0.0
    reference_used = bool(config.algorithm.kl_coef) and config.method == "grpo" and not lora.rank
    reference = shard if reference_used else 0.0
    if config.optimizer.offload_reference:
        reference = 0.0
    on_gpu = config.placement.device == "cuda"
    samples = _samples(config)
    persistent = sum(n for n in shape.sizes() + adapter if n < PERSISTENT) * width if stage == 3 else 0
    policy = "policy shard" if stage == 3 else "policy, whole"
    base = {"CUDA context": CONTEXT if on_gpu else 0.0, policy: shard, "reference shard": reference}
    teacher = hub_config.teacher(config)
    if teacher:
        base |= _teacher_held(config, teacher)
    base |= {"NCCL's communicators": COMMUNICATORS if on_gpu and world > 1 else 0.0}
    base |= {"small parameters": float(persistent)}
    if lora.qlora:
        base["scales of 4 bits"] = linear_weights(shape) * NF4_SCALES
        base["matrix out of 4 bits"] = float(max(a * b for a, b in adapters.linears(shape, False)) * width)
    if config.optimizer.hpz_ranks > 1:
        base["second copy within the node"] = policy_bytes(config, shape) / config.optimizer.hpz_ranks
    states = {"fp32 master": master, "Adam moments": adam}
    asleep = {"engine asleep": ENGINE_ASLEEP} if samples and on_gpu else {}
    # DeepSpeed allocates gradients and the reduce bucket once and keeps them; `offload` moves them away too.
    # On CPU only the pages of the bucket that gradients have touched are resident.
    bucket = float((REDUCE_BUCKET if on_gpu else min(REDUCE_BUCKET, t)) * width)
    # Stages 1 and 2 fill one bucket while the other is reduced; at stage 1 in the type that gradients add up
    # in.
    bucket *= 1 if stage == 3 or not on_gpu else 2 if stage == 2 else 2 * _gradient_width(config) // width
    gradients = (
        t * _gradient_width(config) * (1 / world + (stage == 1))
    )  # stage 1 has all of them until they are reduced
    held = {"gradients": gradients, "reduce bucket": bucket}
    all_held = base | states | held | asleep
    # Adam's moments are made in the first step; DeepSpeed tries that step out with fp32 gradients of a
    # sub-group.
    loaded = held if on_gpu else {"gradients": held["gradients"]}
    group_size = SUB_GROUP if stage == 3 else t  # the other stages step all of a rank's share at once
    sub_group = 0.0 if config.optimizer.offload_optimizer else 4.0 * min(group_size, t / world)
    # Weights in 4 bits are made on every rank before they are cut.
    arriving = base | {policy: whole} if lora.qlora else base
    out = [Phase("load", arriving | {"fp32 master": master} | loaded | {"fp32 gradients": sub_group})]
    weights = p * width / config.rollout.tensor_parallel
    if samples:
        cache = max(0.0, engine_bytes - weights)
        out.append(Phase("rollout", base | {"engine weights": weights, "engine KV cache": cache}))
    # An update keeps what its backward pass will want again, and so does the pass without gradients that
    # follows it: DeepSpeed goes by the order that it has recorded. The reference has its own. One rank's
    # shard is the weights.
    kept = gathering(config, shape, persistent) if world > 1 and stage == 3 else {}
    tokens = logprob_tokens(config, shape)
    pass_ = _larger(
        {"layer at work": activations.forward(config, shape, tokens)},
        {"logits": activations.logits(config, shape, tokens)},
    )
    if teacher:
        pass_ = _larger(pass_, _teacher_pass(config, teacher, tokens))
    out.append(Phase("logprobs", all_held | kept | pass_))
    backward = _backward(config, shape, bucket, flushed_midway=t > REDUCE_BUCKET)
    moments = [kept | backward, _scattered(config, bucket)]
    out.append(Phase("update", all_held | max(moments, key=lambda parts: sum(parts.values()))))
    out.append(Phase("optimizer step", all_held | _step(config, t / world, group_size)))
    if samples:
        group = float(max(config.rollout.sync_bucket_bytes, shape.embedding_parameters * width))
        merged = (
            (width + 8) * max(a * b for a, b in adapters.linears(shape, False)) + group if lora.rank else 0.0
        )
        parts = {"engine weights": weights, "bucket and its copy": 2.0 * group, "merging adapters": merged}
        out.append(Phase("sync", base | parts))
    out.append(Phase("save", all_held))
    return [Phase(phase.name, {k: v for k, v in phase.parts.items() if v}) for phase in out]


def _samples(config: RunConfig) -> bool:
    """Whether the trainer's own GPUs have engines."""
    return config.method == "grpo" and config.fleet.workers != "only"


def _teacher_held(config: RunConfig, teacher: Shape) -> dict[str, float]:
    """What a rank keeps of the teacher in every phase: its shard, and the parameters that are too small to be
    cut."""
    width = _width(config)
    shard = teacher.parameters * width / config.placement.world_size
    small = sum(n for n in teacher.sizes() if n < PERSISTENT) * width
    offloaded = config.optimizer.offload_reference
    return {"teacher shard": 0.0 if offloaded else shard, "teacher's small parameters": float(small)}


def _teacher_pass(config: RunConfig, teacher: Shape, tokens: int) -> dict[str, float]:
    """A pass of the teacher, with passes as large as the policy's; what it gathers is freed when it ends."""
    work = _larger(
        {"layer of the teacher at work": activations.forward(config, teacher, tokens)},
        {"logits of the teacher": activations.logits(config, teacher, tokens)},
    )
    if config.placement.world_size == 1:
        return work
    small = int(_teacher_held(config, teacher)["teacher's small parameters"])
    gathered = gathering(config, teacher, small)
    return work | {f"{name} of the teacher": value for name, value in gathered.items()}


def gathering(config: RunConfig, shape: Shape, persistent: int) -> dict[str, float]:
    """Full weights in a pass, but for the `persistent` bytes of the small ones, which are always there: the
    elements that may live and perhaps the largest parameter on top. The buffer that they are gathered into
    lives as long as any of them. An element of weights in 4 bits is a byte that holds two."""
    most, width = policy_bytes(config, shape), _width(config)
    element, largest = 1 if config.lora.qlora else width, shape.embedding_parameters * width
    whole = min(most, config.optimizer.live_parameters * element + largest)
    buffer = min(most, prefetch_parameters(config, shape) * element)
    return {"gathered layers": float(max(0, whole - persistent)), "gather buffer": float(buffer)}


def _backward(config: RunConfig, shape: Shape, bucket: float, flushed_midway: bool) -> dict[str, float]:
    """A pass with gradients, at the end of its forward half or in its backward half. A bucket that all
    gradients fit into is only scattered when that is over."""
    parts = activations.backward(config, shape)
    if flushed_midway:
        parts |= _scattered(config, bucket)
    return _larger(activations.scored(config, shape), parts)


def _scattered(config: RunConfig, bucket: float) -> dict[str, float]:
    """DeepSpeed's reduce_scatter_coalesced lays the bucket out once more, by ranks; Gloo reduces a clone of
    that."""
    return {"bucket being scattered": bucket * (1 if config.placement.device == "cuda" else 2)}


def _step(config: RunConfig, shard: float, most: int) -> dict[str, float]:
    """What the optimizer's step takes for a sub-group of at most `most` elements: gradients flattened, and in
    fp32 if they are not; what AdamW makes unless it is fused."""
    group, width = min(most, shard), _gradient_width(config)
    if config.optimizer.offload_optimizer or (config.optimizer.zero_stage < 3 and width > _width(config)):
        return {}  # stages 1 and 2 add up in the flat fp32 buffer that the step reads
    gradients = {"flat gradients": float(width * group), "fp32 gradients": 4.0 * group if width < 4 else 0.0}
    if config.placement.device == "cuda":
        return gradients
    return gradients | {"Adam's temporaries": 8.0 * group}  # the square root and the quotient


def _larger(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """The moment that needs more; the two do not coincide."""
    return max(one, other, key=lambda parts: sum(parts.values()))


def _host(recipe: Recipe, shape: Shape) -> dict[str, float]:
    config = recipe.config
    nodes = recipe.cluster.nodes
    gpus = recipe.cluster.gpus_per_node
    width, t = _width(config), trained(config, shape)
    samples, offloaded = _samples(config), config.optimizer.offload_optimizer
    states = 0.0
    if offloaded:
        states = t * (12 + 4) / nodes  # DeepSpeed's CPU optimizer holds fp32 gradients beside the states
    elif samples:
        states = t * 12 / nodes  # gradients are freed, not moved (trainer/learning/zero/offload.py)
    every = config.optimizer.zero_stage < 3 or config.lora.qlora
    whole = policy_bytes(config, shape) * gpus if every else 0.0
    staging = 12.0 * t / nodes if config.checkpoint.asynchronous else 12.0 * t / nodes / gpus
    frozen = hub_config.teacher(config) or shape
    reference = frozen.parameters * width / nodes if config.optimizer.offload_reference else 0.0
    level_1 = (
        shape.parameters * width * gpus / config.rollout.tensor_parallel
        if config.rollout.sleep_level == 1 and samples
        else 0.0
    )
    parts = {
        "system, Ray, graders": HOST_SYSTEM + gpus * GIB,
        "worker processes": gpus * worker_bytes(config.placement.device, config.data.image_cache_gib),
        "ZeRO-3 states while the engine is awake"
        if samples and not offloaded
        else "optimizer states": states,
        "weights that every rank loads": whole,
        "checkpoint being written": staging,
        "reference shards": reference,
        "engine weights at sleep level 1": level_1,
        "shards as rollout workers have them": 0.0 if config.fleet.workers == "off" else t * width / nodes,
    }
    return {name: value for name, value in parts.items() if value}


def _disk(recipe: Recipe, shape: Shape) -> dict[str, float]:
    config = recipe.config
    checkpoints = checkpoints_bytes(config, trained(config, shape)) if recipe.kind == "train" else 0
    model = shape.parameters * 2.0
    exported = 2.0 * trained(config, shape) if config.lora.rank else model
    together = recipe.kind != "train" or bool(recipe.storage.volume) or config.checkpoint.shared_files
    teacher = hub_config.teacher(config) if recipe.kind == "train" else None
    parts = {
        "environment": ENVIRONMENT_DISK,
        "model download": downloaded(config, model, together),
        "teacher download": downloaded(config, teacher.parameters * 2.0, together) if teacher else 0.0,
        "weights of another run": model if recipe.storage.weights else 0.0,
        "data": recipe.dataset.disk_gib * GIB,
        "checkpoints": float(checkpoints),
        "exported weights": (
            exported if recipe.kind == "train" and config.checkpoint.export_hf != "never" else 0.0
        ),
        "Ray session and logs": SPILL_DISK if recipe.kind != "sample" else 0.0,
    }
    return {name: value for name, value in parts.items() if value}


# --- the cheapest change that makes it fit ------------------------------------------------------------------

REMEDIES: tuple[tuple[str, str], ...] = (
    ("algorithm.logprob_tokens", "4096"),
    ("model.gradient_checkpointing", "true"),
    ("algorithm.micro_batch_tokens", "4096"),
    ("optimizer.hpz_ranks", "1"),
    ("optimizer.zero_stage", "3"),
    ("optimizer.live_parameters", "0"),
    ("optimizer.offload_reference", "true"),
    ("optimizer.grad_accum_dtype", "bf16"),
    ("rollout.tensor_parallel", "2"),
    ("rollout.tensor_parallel", "4"),
    ("rollout.tensor_parallel", "8"),
    ("rollout.gpu_memory_utilization", "0.6"),
    ("optimizer.offload_optimizer", "true"),
    ("rollout.gpu_memory_utilization", "0.3"),
    ("cluster.nodes", "2"),
    ("cluster.nodes", "4"),
    ("cluster.nodes", "8"),
)
"""From what costs least (smaller passes, a recomputation) to what costs most (more machines)."""


def cheapest_fix(recipe: Recipe, gpu: str = "") -> list[str]:
    """Overrides, cheapest first, that make a recipe fit; empty if it fits as it is or nothing here helps.

    Every single change is tried first, then pairs, in order of cost.
    """
    current = plan(recipe, gpu)
    if current is None or current.fits:
        return []
    useful = [r for r in REMEDIES if _tried(recipe, [r]) is not None]
    for changes in [[a] for a in useful] + [
        [a, b] for i, b in enumerate(useful) for a in useful[:i] if a[0] != b[0]
    ]:
        changed = _tried(recipe, changes)
        fixed = plan(changed, gpu) if changed is not None else None
        if fixed is not None and fixed.fits:
            return [f"{key}={value}" for key, value in changes]
    return []


def _tried(recipe: Recipe, changes: list[tuple[str, str]]) -> Recipe | None:
    """The recipe with the changes; None where one is not a change for the better or is not valid."""
    try:
        changed = override(recipe, [f"{key}={value}" for key, value in changes])
        validate(changed)
    except ConfigError:
        return None
    if changed.cluster.nodes < recipe.cluster.nodes or changed == recipe:
        return None
    old, new = recipe.config, changed.config
    if new.rollout.tensor_parallel < old.rollout.tensor_parallel:
        return None
    return changed


def with_resources(recipe: Recipe) -> Recipe:
    """The recipe with host RAM, disk and shared memory written out, from the plan where it leaves them
    open."""
    cluster = recipe.cluster
    if cluster.memory_gib and cluster.disk_gib and cluster.shm_gib:
        return placed(recipe)
    need = plan(recipe)
    memory = 16  # a RunPod CPU pod has at most 10 GB of disk per vCPU
    disk = 30
    shm = 4
    if need:
        memory = _up(need.host_bytes, 4)
        disk = _up(need.disk_bytes, 50)
        shm = _up(need.shm_bytes, 8)
    elif cluster.gpus_per_node:
        memory = 64
        disk = 100
        shm = 16
    cluster = replace(
        cluster,
        memory_gib=cluster.memory_gib or memory,
        disk_gib=cluster.disk_gib or disk,
        shm_gib=cluster.shm_gib or shm,
    )
    return placed(replace(recipe, cluster=cluster))


def _up(value: float, multiple: int) -> int:
    return int(-(-value / GIB // multiple) * multiple)
