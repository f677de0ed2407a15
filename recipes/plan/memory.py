"""Bytes per GPU and phase, from the model's shape; every constant says where it is from. `update_memory` has
the update's parts, `host_and_disk` a node's.

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

from dataclasses import replace
from functools import lru_cache, partial

from recipes.plan import activations, hub_config, update_memory
from recipes.plan.activations import dtype_bytes
from recipes.plan.host_and_disk import (
    HOST_SYSTEM,
    SERVER,
    disk,
    has_engines,
    sampling_host,
    training_host,
    without_zeros,
)
from recipes.plan.update_memory import peak_of
from recipes.recipe.resolved import GIB, MemoryPlan, Phase
from recipes.recipe.spec import Recipe, with_placement
from trainer.config import RunConfig
from trainer.config.budget import (
    CHECKPOINT_BYTES_PER_PARAMETER,
    MOST_TOKENS,
    NF4_SCALES,
    SUB_GROUP,
    check_experts,
    linear_weights,
    logprob_tokens,
    longest_sample,
    policy_bytes,
    prefetch_parameters,
    trained,
)
from trainer.config.schema import WORKER_GPU_SHARE
from trainer.hardware import adapters
from trainer.hardware.gpus import gpu_named
from trainer.hardware.model_shapes import Shape

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
OWN_WORKERS = "own workers"
"""Whose phases are those of `fleet.gpus_per_node`."""
ROW_STEP = 1024
"""Tokens by which rows are shortened until they fit."""
PERSISTENT = 100_000
"""DeepSpeed's threshold: smaller parameters stay whole on every rank (those of blocks, some MiB, do not)."""


def plan_memory(recipe: Recipe, gpu: str = "") -> MemoryPlan | None:
    """The memory of a recipe on its GPU (or another); None where there is no GPU or no model to speak of."""
    return _plan(with_rows(recipe), gpu or recipe.cluster.gpu)


@lru_cache(maxsize=128)
def with_rows(recipe: Recipe) -> Recipe:
    """The recipe with `algorithm.micro_batch_tokens` written out where it leaves it open: rows as long as
    every GPU that it names has memory for, up to the length from which products get no faster.

    Long rows are few passes, and a pass costs the host and the network the same whatever its length.
    """
    config = recipe.config
    if recipe.kind != "train" or config.algorithm.micro_batch_tokens or not recipe.cluster.gpus_per_node:
        return recipe
    least = longest_sample(config)
    most = max(least, MOST_TOKENS["cuda"])
    for tokens in (*range(most, least, -ROW_STEP), least):
        algorithm = replace(config.algorithm, micro_batch_tokens=tokens)
        longer = replace(recipe, config=replace(config, algorithm=algorithm))
        if all(map(partial(_has_room, longer), (recipe.cluster.gpu, *recipe.cluster.alternatives))):
            break
    return longer


def _has_room(recipe: Recipe, gpu: str) -> bool:
    need = _plan(recipe, gpu)
    return need is None or need.peak.total <= MOST_OF_A_CARD * need.gpu_bytes


def _plan(recipe: Recipe, gpu: str) -> MemoryPlan | None:
    if recipe.kind in ("preflight", "check") or not recipe.cluster.gpus_per_node:
        return None
    shape = hub_config.shape(recipe.config.model)
    if shape is None or (recipe.config.teaches and hub_config.teacher_shape(recipe.config) is None):
        return None
    check_experts(recipe.config, shape)
    config = recipe.config
    gpus = recipe.cluster.gpus_per_node
    gpu_bytes = gpu_named(gpu).memory_gib * GIB
    engine_bytes = config.rollout.gpu_memory_utilization * gpu_bytes
    weights = shape.parameters * dtype_bytes(config) / config.rollout.tensor_parallel
    kv_bytes = engine_bytes - weights - ENGINE_WORKSPACE
    per_token = _cached_bytes(config, shape)
    match recipe.kind:
        case "train" if not config.loads_policy:
            peaks = [Phase("grading", {"CUDA context": CONTEXT})]
            host: dict[str, float] = {"system": HOST_SYSTEM + gpus * GIB}
        case "train":
            peaks = memory_phases(config, shape, engine_bytes)
            if config.fleet.gpus_per_node:
                share = WORKER_GPU_SHARE * gpu_bytes
                if not has_engines(config):
                    kv_bytes = share - weights - ENGINE_WORKSPACE
                peaks += _of_own_workers(config, shape, weights, share)
            host = training_host(recipe, shape)
        case "sample":
            peaks = _sampling(config, shape, weights, engine_bytes)
            host = sampling_host(recipe, shape)
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
        disk=disk(recipe, shape),
        checkpoint_bytes=(
            float(CHECKPOINT_BYTES_PER_PARAMETER * trained(config, shape)) if recipe.kind == "train" else 0.0
        ),
    )


def _cached_bytes(config: RunConfig, shape: Shape) -> float:
    """What an engine's rank caches for a token, with the token's share of the longest sequence's states."""
    ranks = config.rollout.tensor_parallel
    keys = shape.kv_bytes_per_token(dtype_bytes(config)) / min(ranks, shape.kv_heads)
    return keys + shape.state_bytes(dtype_bytes(config)) / ranks / config.longest_sequence


def _serving(weights: float, engine_bytes: float) -> Phase:
    cache = max(0.0, engine_bytes - weights)
    return Phase("serve", {"CUDA context": CONTEXT, "engine weights": weights, "engine KV cache": cache})


def _sampling(config: RunConfig, shape: Shape, weights: float, engine_bytes: float) -> list[Phase]:
    """Phases of a machine that only samples: its engine never sleeps, and no state of training is there.
    Weights reach the GPUs of an engine of several whole, a group at a time; those of one from the host."""
    parts = {"CUDA context": CONTEXT, "engine weights": weights, "engine workspace": ENGINE_WORKSPACE}
    if config.rollout.tensor_parallel > 1:
        parts["NCCL's communicators"] = COMMUNICATORS
    cache = {"engine KV cache": max(0.0, engine_bytes - weights - ENGINE_WORKSPACE)}
    phases = [Phase("rollout", parts | cache)]
    if config.rollout.tensor_parallel > 1:
        del parts["engine workspace"]  # free, since nothing is decoded meanwhile
        parts["engine's graphs"] = ENGINE_ASLEEP
        group = max(config.rollout.sync_bucket_bytes, shape.largest_parameter * dtype_bytes(config))
        phases.append(Phase("sync", parts | cache | {"bucket and its copy": 2.0 * group}))
    return phases


def _of_own_workers(config: RunConfig, shape: Shape, weights: float, engine_bytes: float) -> list[Phase]:
    """Phases of those GPUs of the run's own nodes that sample while the others learn."""
    phases = _sampling(config, shape, weights, engine_bytes)
    return [Phase(f"{OWN_WORKERS}' {phase.name}", phase.parts) for phase in phases]


def memory_phases(config: RunConfig, shape: Shape, engine_bytes: float) -> list[Phase]:
    """All phases of one rank. engine_bytes: the engine's share of the GPU while awake."""
    world = config.placement.world_size
    width = dtype_bytes(config)
    stage = config.optimizer.zero_stage
    offloaded = config.optimizer.offload_optimizer
    on_gpu = config.placement.device == "cuda"
    samples = has_engines(config)
    t = trained(config, shape)

    base = _base(config, shape)
    master = 0.0 if offloaded else 4.0 * t / world
    adam = 0.0 if offloaded else 8.0 * t / world
    gradients = update_memory.gradient_bytes(config, t)
    asleep = {"engine's graphs": ENGINE_ASLEEP} if samples and on_gpu else {}
    all_held = base | {"fp32 master": master, "Adam moments": adam} | gradients | asleep

    # Adam's moments are made in the first step; DeepSpeed tries that step out with fp32 gradients of a
    # sub-group.
    loaded = gradients if on_gpu else {"gradients": gradients["gradients"]}
    group_size = SUB_GROUP if stage == 3 else t  # the other stages step all of a rank's share at once
    sub_group = 0.0 if offloaded else 4.0 * min(group_size, t / world)
    # Weights in 4 bits are made on every rank before they are cut.
    arriving = base | {_policy_part(config): _whole_policy(config, shape)} if config.lora.qlora else base
    out = [Phase("load", arriving | {"fp32 master": master} | loaded | {"fp32 gradients": sub_group})]

    weights = shape.parameters * width / config.rollout.tensor_parallel
    if samples:
        cache = max(0.0, engine_bytes - weights)
        out.append(Phase("rollout", base | {"engine weights": weights, "engine KV cache": cache}))

    # An update keeps what its backward pass will want again, and so does the pass that scores after it:
    # DeepSpeed goes by the order that it has recorded. The reference has its own. One rank has all weights.
    gathers = world > 1 and stage == 3
    kept = gathering(config, shape, _small_bytes(config, shape)) if gathers else {}
    out.append(Phase("logprobs", all_held | kept | _scoring_pass(config, shape)))

    bucket = gradients["reduce bucket"]
    backward = update_memory.backward(config, shape, bucket, t)
    out.append(Phase("update", all_held | peak_of(kept | backward, update_memory.scattered(config, bucket))))
    out.append(
        Phase("optimizer step", all_held | update_memory.optimizer_step(config, t / world, group_size))
    )

    if samples:
        group = float(max(config.rollout.sync_bucket_bytes, shape.largest_parameter * width))
        merged = (width + 8) * _largest_linear(shape) + group if config.lora.rank else 0.0
        parts = {"engine weights": weights, "bucket and its copy": 2.0 * group, "merging adapters": merged}
        # vLLM makes a layer anew and copies that over the old one.
        parts["layer being packed"] = shape.largest_parameter * width / config.rollout.tensor_parallel
        out.append(Phase("sync", base | parts | asleep))
    out.append(Phase("save", all_held))
    return [Phase(phase.name, without_zeros(phase.parts)) for phase in out]


def _base(config: RunConfig, shape: Shape) -> dict[str, float]:
    """What a rank holds in every phase."""
    world = config.placement.world_size
    on_gpu = config.placement.device == "cuda"
    shard = _whole_policy(config, shape)
    if config.optimizer.zero_stage == 3:
        shard = shard / world
    has_reference = config.method == "grpo" and config.algorithm.kl_coef > 0 and not config.lora.rank
    reference = shard if has_reference and not config.optimizer.offload_reference else 0.0

    parts = {
        "CUDA context": CONTEXT if on_gpu else 0.0,
        _policy_part(config): shard,
        "reference shard": reference,
    }
    teacher = hub_config.teacher_shape(config)
    if teacher:
        parts |= _teacher_held(config, teacher)
    parts["NCCL's communicators"] = COMMUNICATORS if on_gpu and world > 1 else 0.0
    parts["small parameters"] = float(_small_bytes(config, shape))
    if config.lora.qlora:
        parts["scales of 4 bits"] = linear_weights(shape) * NF4_SCALES
        parts["matrix out of 4 bits"] = float(_largest_linear(shape) * dtype_bytes(config))
    if config.optimizer.hpz_ranks > 1:
        parts["second copy within the node"] = policy_bytes(config, shape) / config.optimizer.hpz_ranks
    return parts


def _policy_part(config: RunConfig) -> str:
    return "policy shard" if config.optimizer.zero_stage == 3 else "policy, whole"


def _whole_policy(config: RunConfig, shape: Shape) -> float:
    """The policy's weights and adapters, before they are cut."""
    adapter = adapters.adapter_sizes(shape, config.lora.rank, config.lora.vision)
    return policy_bytes(config, shape) + sum(adapter) * dtype_bytes(config)


def _small_bytes(config: RunConfig, shape: Shape) -> int:
    """The policy's parameters that are too small to be cut; 0 at ZeRO-1 and 2, which cut none."""
    if config.optimizer.zero_stage < 3:
        return 0
    adapter = adapters.adapter_sizes(shape, config.lora.rank, config.lora.vision)
    return _small(shape.sizes() + adapter) * dtype_bytes(config)


def _small(sizes: list[int]) -> int:
    """Elements of all parameters that are too small to be cut. sizes: elements of each parameter."""
    return sum(size for size in sizes if size < PERSISTENT)


def _largest_linear(shape: Shape) -> int:
    """Elements of the largest matrix that gets an adapter."""
    return max(inputs * outputs for inputs, outputs in adapters.adapted_linears(shape, False))


def _scoring_pass(config: RunConfig, shape: Shape) -> dict[str, float]:
    """A pass without gradients, at its worst moment."""
    tokens = logprob_tokens(config, shape)
    work = peak_of(
        {"layer at work": activations.forward(config, shape, tokens)},
        {"logits": activations.logits(config, shape, tokens) + activations.head(config, shape)},
    )
    teacher = hub_config.teacher_shape(config)
    return peak_of(work, _teacher_pass(config, teacher, tokens)) if teacher else work


def _teacher_held(config: RunConfig, teacher: Shape) -> dict[str, float]:
    """What a rank keeps of the teacher in every phase: its shard, and the parameters that are too small to be
    cut."""
    width = dtype_bytes(config)
    shard = teacher.parameters * width / config.placement.world_size
    small = _small(teacher.sizes()) * width
    offloaded = config.optimizer.offload_reference
    return {"teacher shard": 0.0 if offloaded else shard, "teacher's small parameters": float(small)}


def _teacher_pass(config: RunConfig, teacher: Shape, tokens: int) -> dict[str, float]:
    """A pass of the teacher, with passes as large as the policy's; what it gathers is freed when it ends."""
    work = peak_of(
        {"layer of the teacher at work": activations.forward(config, teacher, tokens)},
        {
            "logits of the teacher": activations.logits(config, teacher, tokens)
            + activations.head(config, teacher)
        },
    )
    if config.placement.world_size == 1:
        return work
    small = int(_teacher_held(config, teacher)["teacher's small parameters"])
    gathered = gathering(config, teacher, small)
    return work | {f"{name} of the teacher": value for name, value in gathered.items()}


def gathering(config: RunConfig, shape: Shape, persistent: int) -> dict[str, float]:
    """Full weights in a pass, but for the `persistent` bytes of the small ones, which are always there: the
    elements that may live and perhaps a block on top (`activations.head` has what the head takes more). The
    buffer that they are gathered into lives as long as any of them. An element of weights in 4 bits is a
    byte that holds two."""
    most = policy_bytes(config, shape)
    width = dtype_bytes(config)
    element = 1 if config.lora.qlora else width
    block = shape.layer_parameters * element
    whole = min(most, config.optimizer.live_parameters * element + block)
    buffer = min(most, prefetch_parameters(config, shape) * element)
    return {"gathered layers": float(max(0, whole - persistent)), "gather buffer": float(buffer)}


def with_resources(recipe: Recipe) -> Recipe:
    """The recipe with host RAM, disk and shared memory written out, from the plan where it leaves them
    open."""
    recipe = with_rows(recipe)
    cluster = recipe.cluster
    if cluster.memory_gib and cluster.disk_gib and cluster.shm_gib:
        return with_placement(recipe)
    need = plan_memory(recipe)
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
    return with_placement(replace(recipe, cluster=cluster))


def _up(value: float, multiple: int) -> int:
    return int(-(-value / GIB // multiple) * multiple)
