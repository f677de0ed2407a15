"""Seconds per step, dollars per run, and what preemptions cost. A model with stated assumptions, not a
measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.plan import hub_config, passes, spread, start_time
from recipes.plan.memory import plan_memory, with_resources, with_rows
from recipes.plan.passes import Passes
from recipes.plan.prices import Price, gpu_price
from recipes.platforms.targets import TARGETS, refusal, target_named, targets_for
from recipes.recipe.resolved import MemoryPlan
from recipes.recipe.spec import Recipe
from trainer.config import ConfigError, RunConfig, checkpoint_suffices, nodes_share_weights
from trainer.config.budget import image_token_cost, linear_weights, policy_bytes, trained
from trainer.hardware.gpus import Gpu, gpu_named
from trainer.hardware.model_shapes import Shape
from trainer.hardware.save_interval import save_interval_s

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
ENGINE_STEP_S = 4e-3
"""Host work of a decode step, whatever the model: asynchronous scheduling leaves 0.3 to 2.5 ms by reading
vLLM; with less than 4 published steps of 32B lie beyond the plan's range (assumption)."""
NETWORK = 0.7
"""Share of the link rate that collectives reach."""
SEQUENCE_S = 20e-6
"""The same for every sequence of a decode step: its seeded draw, its log-probability and its output on the
host (assumption)."""
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
DOWNLOAD_BYTES_S = 500e6
"""Model download."""
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


@dataclass(frozen=True)
class Offer:
    """One way to run a recipe."""

    target: str
    gpu: str
    spot: bool
    usd_per_hour: float | None
    """All nodes; None where the machines are yours."""
    step: StepTime
    steps: int
    hours: float
    """Expected wall-clock, preemptions included."""
    interval_s: float
    """Seconds of work between checkpoints."""
    preemptions: float
    """Expected number."""
    start_s: float
    """Seconds until the first step."""
    stall_s: float
    """Seconds that training stands still for a checkpoint."""
    restart_s: float
    """Seconds that a preemption costs besides the work that is done again."""
    between_s: float
    """Mean seconds between preemptions; infinite on demand."""
    restart: start_time.Restart
    """What of `restart_s` is waited for on the new machine."""
    nodes: int = 1
    vision: bool = False
    """Whether the model reads images: the spread of such steps is wider."""
    several_nodes: bool = False
    """Whether supervised training runs on several nodes, whose steps have a range of their own."""
    stretch: tuple[float, ...] = ()
    """A step's time at each of `spread.LENGTHS`, as a multiple; () where completions have the data's length,
    or nobody asked."""

    @property
    def work_s(self) -> float:
        """Seconds of all steps, without checkpoints."""
        return self.steps * (self.step.total - self.step.checkpoint)

    @property
    def step_bounds(self) -> tuple[float, float]:
        """How far a step may lie from its plan, as multiples."""
        return spread.step_bounds(self.vision, self.several_nodes)

    @property
    def published_end(self) -> float:
        """The slowest published step, as a multiple of its plan."""
        return spread.published_end(self.vision)

    @property
    def usd(self) -> float | None:
        """Expected dollars of the run."""
        return None if self.usd_per_hour is None else self.usd_per_hour * self.hours


def expected_seconds(
    work_s: float, interval_s: float, stall_s: float, restart_s: float, mtbp_s: float
) -> float:
    """Expected wall-clock of `work_s` seconds of work, saved every `interval_s`, under Poisson preemptions.

    Each segment of interval + stall is redone until it ends without a preemption; a preemption also costs
    `restart_s`, in which further ones may fall: M e^(R/M) (e^((t + d)/M) - 1) per segment (Daly 2006, eq.
    20). No preemptions: mtbp_s = infinity.
    """
    if work_s <= 0:
        return 0.0
    interval = min(interval_s, work_s) if interval_s > 0 else work_s
    segments = work_s / interval
    if math.isinf(mtbp_s):
        return work_s + segments * stall_s
    return segments * mtbp_s * math.exp(restart_s / mtbp_s) * math.expm1((interval + stall_s) / mtbp_s)


def steps_of(recipe: Recipe) -> int:
    """Steps of the whole run. Raises ConfigError where the rows are too few for one."""
    config = recipe.config
    rows = min(config.data.max_samples or recipe.dataset.rows, recipe.dataset.rows or 1)
    asked_only = bool(config.evaluation.pass_rate_samples)
    if recipe.kind == "train" and not asked_only and 0 < rows < config.rows_per_step:
        key = "sft.batch_size" if config.method == "sft" else "rollout.prompts_per_step"
        raise ConfigError(
            f"{recipe.dataset.name or config.data.path} has {rows} rows and a step takes "
            f"{config.rows_per_step}: lower {key}, or give more rows"
        )
    if config.run.max_steps:
        return config.run.max_steps
    passes_over = config.sft.epochs if config.method == "sft" else config.data.episodes
    return max(1, rows * passes_over // config.rows_per_step)


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
    stall = stall_seconds(recipe, shape, card) / every
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


def network_of(recipe: Recipe, target: str | None) -> float:
    """Gbit/s between nodes that the target is taken to have; 100 where that is not said."""
    can = TARGETS.get(target or "")
    if not can or recipe.cluster.nodes == 1:  # one pod has no network to others
        return 100.0
    return can.network_gbit_s.get(recipe.cluster.gpu, can.network_gbit_s[""]) or 100.0


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


def stall_seconds(recipe: Recipe, shape: Shape, card: Gpu) -> float:
    """Seconds that training stands still for one checkpoint: the copy to the host, or the whole write."""
    shard = 12.0 * trained(recipe.config, shape)
    copy = shard / recipe.config.placement.world_size / (card.pcie_gb_per_s * 1e9)
    if recipe.config.checkpoint.asynchronous:
        return copy
    return copy + shard / recipe.cluster.nodes / UPLOAD_BYTES_S


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


def offers(
    recipe: Recipe,
    catalogs: Path | None = None,
    targets: list[str] | None = None,
    ranges: bool = False,
    network_gbit_s: float | None = None,
) -> list[Offer]:
    """Every target, GPU and market that can run the recipe within its hourly limit, in order of the expected
    dollars of the run; machines of your own last. None of what trains nothing: `node_prices` is all that it
    costs. ranges: also how a step's time follows the length of completions. network_gbit_s: between nodes, as
    it was measured; None: the target's."""
    if recipe.kind != "train":
        return []
    found, recipe = [], with_resources(recipe)
    most = recipe.budget.max_hourly_usd or math.inf
    for target, gpu, need, row in possible_places(recipe, catalogs, targets):
        can = TARGETS[target]
        if can.sold and not row:
            continue
        if row and lacks_ram(recipe, row):
            continue
        network = network_gbit_s or can.network_gbit_s.get(gpu, can.network_gbit_s[""]) or 100.0
        step = step_time(recipe, gpu, network, need)
        stretch = stretched_steps(recipe, gpu, network, need, step) if ranges else ()
        for spot in markets(recipe, target):
            hourly = (row.spot if spot else row.on_demand) if row else None
            if (row and hourly is None) or (hourly or 0.0) * recipe.cluster.gpus_per_node > most:
                continue
            # What is rendered rests on nothing of this machine: neither catalogs nor runs nor images.
            pull = start_time.pull_seconds(recipe.cluster.image) if catalogs else None
            ready = start_time.start_seconds(target, pull is not None) if catalogs else (start_time.BOOT_S, 0)
            found.append(_offer(recipe, target, gpu, spot, hourly, step, need, ready, pull, stretch))
    return sorted(found, key=lambda o: (o.usd is None, o.usd or o.hours))


def node_prices(recipe: Recipe, target: str, catalogs: Path | None = None) -> list[tuple[float, str, bool]]:
    """(Dollars per node and hour, GPU, spot) of what the target may rent and has a known price; cheapest
    first."""
    found = []
    for name in target_members(recipe, target):
        for gpu in TARGETS[name].gpus_for(recipe) if recipe.cluster.gpus_per_node else []:
            row = gpu_row(recipe, name, gpu, catalogs)
            if row is None:
                continue
            for spot in markets(recipe, name):
                usd = row.spot if spot else row.on_demand
                if usd is not None:
                    found.append((usd * recipe.cluster.gpus_per_node, gpu, spot))
    return sorted(found)


def usd_per_hour(recipe: Recipe, target: str, catalogs: Path | None = None) -> float:
    """What all nodes cost per hour at the cheapest known price, of one whose RAM is enough first. 0: not
    known."""
    found = expected_offer(recipe, target, catalogs)
    if found:
        return found.usd_per_hour or 0.0
    prices = node_prices(recipe, target, catalogs)
    cheapest = prices[0][0] if prices else 0.0
    return cheapest * (recipe.cluster.nodes * recipe.jobs)


def expected_offer(recipe: Recipe, target: str, catalogs: Path | None = None) -> Offer | None:
    """The offer that a launch is expected to get: the cheapest with a known price; None without any."""
    for offer in offers(recipe, catalogs, target_members(recipe, target), ranges=True):
        if offer.usd_per_hour:
            return offer
    return None


def rented_usd(
    recipe: Recipe, target: str, cloud: str, engine_name: str, spot: bool, catalogs: Path | None = None
) -> float:
    """What all nodes cost per hour of what a platform says that it has rented. 0: not known."""
    count = recipe.cluster.gpus_per_node
    for name in target_members(recipe, target):
        can = TARGETS[name]
        for gpu in can.gpus_for(recipe) if can.cloud == cloud else []:
            row = gpu_row(recipe, name, gpu, catalogs)
            if row and can.engine_gpu(gpu, count) == engine_name:
                return ((row.spot if spot else row.on_demand) or 0.0) * count * recipe.cluster.nodes
    return 0.0


def target_members(recipe: Recipe, target: str) -> list[str]:
    """The targets that one stands for: `skypilot` chooses among clouds. Raises ConfigError where site.clouds
    names another than SkyPilot's."""
    members = target_named(target).members(recipe)
    return [member.name for member in members if not refusal(recipe, member.name)]


def market_of(spot: bool) -> str:
    """How rented machines are had, in a word."""
    return "spot" if spot else "on demand"


def markets(recipe: Recipe, target: str) -> tuple[bool, ...]:
    """Whether spot, on-demand or both are asked for."""
    if not recipe.cluster.gpus_per_node or not target_named(target).uses_spot(recipe):
        return (False,)
    return (True,) if recipe.cluster.spot == "only" else (True, False)


def possible_places(
    recipe: Recipe, catalogs: Path | None, targets: list[str] | None
) -> Iterator[tuple[str, str, MemoryPlan, Price | None]]:
    """Every target and GPU that the model fits, with the price if one is known."""
    plans: dict[str, MemoryPlan | None] = {}  # the same on every target
    for target in targets or targets_for(recipe):
        if target_named(target).chooses:
            continue
        for gpu in target_named(target).gpus_for(recipe):
            if gpu not in plans:
                plans[gpu] = plan_memory(recipe, gpu)
            need = plans[gpu]
            if need is not None and need.fits:
                yield target, gpu, need, gpu_row(recipe, target, gpu, catalogs)


def gpu_row(recipe: Recipe, target: str, gpu: str, catalogs: Path | None) -> Price | None:
    """What a GPU costs in the machines that the recipe asks for."""
    can, count = target_named(target), recipe.cluster.gpus_per_node
    return gpu_price(can.price_market(recipe), gpu, catalogs, can.price_variant(recipe, gpu), count)


def listed_usd(recipe: Recipe, target: str, gpu: str) -> float:
    """Dollars per hour of one GPU on demand, whatever the machine has of them; 0: not known."""
    can = target_named(target)
    row = gpu_price(can.price_market(recipe), gpu, variant=can.price_variant(recipe, gpu)) if gpu else None
    return row.on_demand if row else 0.0


def lacks_ram(recipe: Recipe, row: Price) -> bool:
    """Whether less RAM comes with the GPUs of a node than the recipe asks for, as far as it is known."""
    return (
        row.host_gib is not None and row.host_gib * recipe.cluster.gpus_per_node < recipe.cluster.memory_gib
    )


def _offer(
    recipe: Recipe,
    target: str,
    gpu: str,
    spot: bool,
    hourly: float | None,
    step: StepTime,
    need: MemoryPlan,
    ready: tuple[float, int],
    pull: float | None,
    stretch: tuple[float, ...],
) -> Offer:
    config, cluster = recipe.config, recipe.cluster
    steps = steps_of(recipe)
    work = steps * (step.total - step.checkpoint)
    stall = stall_seconds(recipe, need.shape, gpu_named(gpu))
    between = config.checkpoint.mean_time_between_preemptions_s if spot else math.inf
    # a save is of use only once it is in the bucket
    upload = need.checkpoint_bytes / cluster.nodes / UPLOAD_BYTES_S
    if config.checkpoint.every_steps:
        interval = config.checkpoint.every_steps * (step.total - step.checkpoint)
    else:
        best = save_interval_s(stall, config.checkpoint.mean_time_between_preemptions_s)
        interval = max(step.total, best, upload)
    until_ready, runs = ready
    measured = until_ready if runs else 0.0  # a restart is then taken to last as long as those launches
    speed = DOWNLOAD_BYTES_S * (cluster.nodes if nodes_share_weights(config) else 1)
    base = need.shape.parameters * 2 / speed
    teacher = hub_config.teacher_shape(config)
    judge = teacher.parameters * 2 / speed if teacher else 0.0
    start = start_time.Restart(base + judge, 0.0, measured, pull).total()
    again = judge if checkpoint_suffices(config) else base + judge
    restart = start_time.Restart(again, upload, measured, pull)
    lost = restart.total() + upload  # what was being uploaded is lost
    seconds = start + expected_seconds(work, interval, stall, lost, between)
    usd_per_hour = None if hourly is None else hourly * cluster.gpus_per_node * cluster.nodes
    preemptions = 0.0 if math.isinf(between) else seconds / between
    return Offer(
        target,
        gpu,
        spot,
        usd_per_hour,
        step,
        steps,
        seconds / 3600,
        interval,
        preemptions,
        start,
        stall,
        lost,
        between,
        restart,
        cluster.nodes,
        need.shape.vision is not None,
        recipe.config.method == "sft" and recipe.cluster.nodes > 1,
        stretch,
    )
