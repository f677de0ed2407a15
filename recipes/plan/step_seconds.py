"""Seconds of a step by phase, on one kind of GPU: a model with stated assumptions, not a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recipes.plan import hub_config, passes, spread
from recipes.plan.memory import with_rows
from recipes.plan.passes import Passes
from recipes.platforms.clouds import CloudDisk
from recipes.recipe.resolved import MemoryPlan
from recipes.recipe.spec import Recipe
from trainer.config import RunConfig
from trainer.config.budget import image_token_cost, linear_weights, policy_bytes, trained
from trainer.hardware.gpus import Gpu, gpu_named
from trainer.hardware.model_shapes import Shape

MATMUL = 0.4
"""Share of the peak that training's matrix products reach, recomputation counted as work: what torchtitan's
Llama-70B reaches on 256 H100 with all recomputed (30% of the peak without counting it)."""
PRODUCTS, TRAFFIC = 0.7, 0.85
"""Shares of peak and of memory bandwidth that single kernels reach: the roofline of a pass (assumption)."""
MOVED = 60.0
"""Bytes that a pass's other kernels (norms, rotary, SwiGLU) read and write, for each token, layer, forward
pass and unit of the intermediate width: 52 to 63 at 3B and 7B (benchmarks/rehearsal.json)."""
REACHED = 0.85
"""Share of that roofline that a pass reaches (assumption)."""
PREFILL = 0.4
"""The same for the engine's prefill, and for decoding so many sequences that compute bounds it."""
DECODE = 0.6
"""Share of memory bandwidth that decoding reaches."""
ENGINE_STEP_S = 2.4e-3
"""Host work of a decode step, whatever the model: what vLLM's engine of 3B took on a device that computes
nothing (benchmarks/host_time.json, iterations). An H100's rollout of 3B took 12.5 and 13.9 s of 15.5."""
NETWORK = 0.7
"""Share of the link rate that collectives reach."""
SEQUENCE_S = 26e-6
"""The same for every sequence of a decode step: its seeded draw, its log-probability and its output on the
host; measured with it."""
ALL_REDUCE_S = 25e-6
"""Latency of one tensor-parallel all-reduce of a decode step; two per layer."""
UNPACKED = 70.0
"""Bytes of memory traffic that a 4-bit weight costs in a pass, unpacked forward, again and backward.

So much longer than with LoRA take Qwen's published steps with Q-LoRA (7B, 14B: 71 and 74; GPTQ's kernels)."""
BLOCK_S = 1.5e-3
"""Host seconds of a block in each direction of a pass, kernels launched one by one (assumption): what
transformers' layers took on a device that computes nothing, put on an H100's host by the update of 3B that
both have run."""
SHARDED = 1.3
"""How many times longer the host takes for a block whose weights ZeRO-3 gathers and whose gradients it
reduces (assumption): benchmarks/host_time.json has for 3B on two ranks 1.3 times what one rank takes to
learn, and 1.5 to score."""
UPLOAD_BYTES_S = 1e9
"""Checkpoint upload per node."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by phase."""

    rollout: float
    logprobs: float
    update: float
    sync: float
    checkpoint: float

    @property
    def total(self) -> float:
        return self.rollout + self.logprobs + self.update + self.sync + self.checkpoint


def step_time(recipe: Recipe, gpu: str, network_gbit_s: float, need: MemoryPlan) -> StepTime:
    """Seconds of one step on a GPU with so much network per node."""
    recipe = with_rows(recipe)
    config = recipe.config
    shape = need.shape
    card = gpu_named(gpu)
    step = passes.of_step(recipe, shape)
    gather = gather_seconds(recipe, shape, card, network_gbit_s)
    within = gather_seconds(recipe, shape, card, network_gbit_s, hpz=True)
    token = token_seconds(shape, card)
    host = host_seconds(config, shape)
    unpack = unpack_seconds(config, shape, card)
    update = update_seconds(config, shape, step.updates, token, gather, within, host, unpack)
    every = config.checkpoint.every_steps or 1e9
    stall = stall_seconds(recipe, need, card) / every
    if config.method == "sft":
        lost = spread.SEVERAL_NODES if recipe.cluster.nodes > 1 else 1.0
        return StepTime(0.0, 0.0, update * lost, 0.0, stall)
    forward = host / (2 + config.model.gradient_checkpointing)
    logprobs = step.models * sum(max(cost * token, gather, forward) for cost in step.logprobs)
    logprobs += teacher_seconds(recipe, card, network_gbit_s, step)
    states = (shape.parameters * 2 + trained(config, shape) * 14) / config.placement.world_size
    move = 0.0 if config.optimizer.offload_optimizer else 2 * states / (card.pcie_gb_per_s * 1e9)
    sync = gather + shape.parameters * 2 / config.rollout.tensor_parallel / (card.hbm_gb_per_s * 1e9) + move
    rollout = rollout_seconds(recipe, shape, card, need, step)
    return StepTime(rollout, logprobs, update, sync, stall)


def update_seconds(
    config: RunConfig,
    shape: Shape,
    costs: Sequence[float],
    token_s: float,
    gather_s: float,
    within_s: float,
    host_s: float,
    unpack_s: float = 0.0,
) -> float:
    """Seconds of one optimizer step: a pass takes as long as its products, its collectives or its host's work
    does, whichever is longest; below stage 3 the updated weights are gathered after all of them.

    costs: of each pass, in tokens' worth of matrix products. token_s: forward seconds of one. gather_s: until
    every rank has seen all weights; within_s: the same in the backward pass, which hpZ keeps inside the node.
    host_s: for which a pass keeps the host busy. unpack_s: unpacking of 4-bit weights in a pass. At stage 3
    every pass gathers weights, forward and again backward, and reduce-scatters gradients; DeepSpeed's stages
    1 and 2 all-reduce them, which sends twice as much, in the last pass or in every one.
    """
    stage = config.optimizer.zero_stage
    reduced = gather_s * trained(config, shape) / shape.parameters
    wire = [2 * reduced] * len(costs)
    if stage == 3:
        wire = [gather_s + passes.backward_gathers(config, shape) * within_s + reduced] * len(costs)
    elif stage == 1:
        wire[:-1] = [0.0] * (len(costs) - 1)
    # Weights that are not trained need no gradients.
    flops = 3 + config.model.gradient_checkpointing - bool(config.lora.rank)
    seconds = 0.0 if stage == 3 else reduced
    for cost, sent in zip(costs, wire, strict=True):
        seconds += max(flops * cost * token_s + unpack_s, sent, host_s)
    return seconds


def stretched_steps(
    recipe: Recipe, gpu: str, network_gbit_s: float, need: MemoryPlan, step: StepTime
) -> tuple[float, ...]:
    """A step's time at each of `spread.LENGTHS` as a multiple of `step`; () in supervised training, whose
    data has the lengths."""
    if recipe.config.method == "sft":
        return ()
    times = []
    for factor in spread.LENGTHS:
        tokens = round(recipe.dataset.answer_tokens * factor)
        longer = replace(recipe, dataset=replace(recipe.dataset, answer_tokens=max(1, tokens)))
        times.append(step_time(longer, gpu, network_gbit_s, need).total / step.total)
    return tuple(times)


def token_seconds(shape: Shape, card: Gpu) -> float:
    """Forward seconds of a token's worth of the schedule's costs; the backward pass takes twice as long.

    Small models are held up by memory: then their roofline is what bounds them.
    """
    peak_s = 2 * shape.matmul_parameters / (card.bf16_tflops * 1e12)
    traffic_s = MOVED * shape.layers * shape.intermediate / (card.hbm_gb_per_s * 1e9 * TRAFFIC)
    return max(peak_s / MATMUL, (peak_s / PRODUCTS + traffic_s) / REACHED)


def unpack_seconds(config: RunConfig, shape: Shape, card: Gpu) -> float:
    """Seconds of a pass in which 4-bit weights become 16-bit ones, on every rank; 0 without `lora.qlora`."""
    if not config.lora.qlora:
        return 0.0
    return linear_weights(shape) * UNPACKED / (card.hbm_gb_per_s * 1e9)


def teacher_seconds(recipe: Recipe, card: Gpu, network_gbit_s: float, step: Passes) -> float:
    """Seconds of the teacher's passes in a step, by its own shape: products, gathering its shards, or the
    host."""
    teacher = hub_config.teacher_shape(recipe.config)
    if teacher is None:
        return 0.0
    token = token_seconds(teacher, card)
    gather = gather_seconds(recipe, teacher, card, network_gbit_s)
    host = passes.count_blocks(teacher) * BLOCK_S * _sharded(recipe.config)
    return sum(max(cost * token, gather, host) for cost in step.teacher)


def host_seconds(config: RunConfig, shape: Shape) -> float:
    """Seconds for which a pass of the update keeps the host busy: forward, again if layers are recomputed,
    backward. The GPU computes meanwhile, and waits where it is done earlier."""
    directions = 2 + config.model.gradient_checkpointing
    return directions * passes.count_blocks(shape) * BLOCK_S * _sharded(config)


def _sharded(config: RunConfig) -> float:
    """`SHARDED` where the weights are; one rank has them whole, and so have the other stages."""
    return SHARDED if config.optimizer.zero_stage == 3 and config.placement.world_size > 1 else 1.0


def gather_seconds(
    recipe: Recipe, shape: Shape, card: Gpu, network_gbit_s: float, hpz: bool = False
) -> float:
    """Seconds until every rank has seen all weights once: the slower of NVLink and the nodes' network; with
    `hpz` from the node's second copy, where there is one."""
    world, nodes = recipe.config.placement.world_size, recipe.cluster.nodes
    if hpz and recipe.config.optimizer.hpz_ranks > 1:
        world, nodes = recipe.config.optimizer.hpz_ranks, 1
    volume = policy_bytes(recipe.config, shape)
    inside = volume * (world - 1) / world / (card.nvlink_gb_per_s * 1e9 * NETWORK)
    between = volume * (nodes - 1) / nodes / (network_gbit_s / 8 * 1e9 * NETWORK) if nodes > 1 else 0.0
    return max(inside, between)


def save_seconds(recipe: Recipe, need: MemoryPlan, disk: CloudDisk | None) -> float:
    """Seconds until a checkpoint is in the bucket: written to the node's disk (None: NVMe), then sent."""
    part = need.checkpoint_bytes / recipe.cluster.nodes
    return part / UPLOAD_BYTES_S + (part / disk.write_bytes_per_s(recipe.cluster.disk_gib) if disk else 0.0)


def stall_seconds(recipe: Recipe, need: MemoryPlan, card: Gpu) -> float:
    """Seconds that training stands still for one checkpoint: the copy to the host."""
    return need.checkpoint_bytes / recipe.config.placement.world_size / (card.pcie_gb_per_s * 1e9)


def rollout_seconds(recipe: Recipe, shape: Shape, card: Gpu, need: MemoryPlan, step: Passes) -> float:
    """An engine decodes until its longest completion is done, and reads all weights for every token of that
    one. Prompts, and images in the tower, are read once for a group."""
    config = recipe.config
    tp = config.rollout.tensor_parallel
    engines = config.placement.world_size / tp
    flops, bandwidth = tp * card.bf16_tflops * 1e12 * PREFILL, tp * card.hbm_gb_per_s * 1e9 * DECODE
    waves = max(1.0, step.tokens / engines / max(need.kv_cache_tokens, 1))
    steps = step.longest + (waves - 1) * step.mean
    at_once = step.mean * len(step.lengths) / engines / steps
    read = (
        steps * shape.read_parameters(at_once) * 2.0 + step.context / engines * shape.kv_bytes_per_token()
    ) / bandwidth
    compute = step.mean * len(step.lengths) / engines * 2 * shape.matmul_parameters / flops
    latency = ENGINE_STEP_S + (2 * shape.layers * ALL_REDUCE_S if tp > 1 else 0.0)
    sampled = step.mean * len(step.lengths) / engines * SEQUENCE_S
    once = config.rollout.samples_per_prompt if config.rollout.prefix_caching else 1
    prompts, seen = step.prompts
    images = step.image_tokens * image_token_cost(shape) * 2 * shape.matmul_parameters
    prefill = prompts * shape.flops_per_token(seen) / once + images
    return prefill / engines / flops + max(read, compute) + steps * latency + sampled
