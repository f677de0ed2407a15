"""Hours and dollars of a run, and what preemptions cost: offers of machines. A model with stated assumptions,
not a measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes.plan import hub_config, spread
from recipes.plan.memory import plan_memory, with_resources
from recipes.plan.prices import Price, gpu_price
from recipes.plan.step_seconds import StepTime, save_seconds, stall_seconds, step_time, stretched_steps
from recipes.platforms.targets import TARGETS, target_named, targets_for
from recipes.recipe.resolved import MemoryPlan
from recipes.recipe.spec import Recipe
from trainer.config import ConfigError, checkpoint_suffices, nodes_share_weights
from trainer.hardware.gpus import gpu_named
from trainer.hardware.save_interval import save_interval_s

DOWNLOAD_BYTES_S = 500e6
"""Model download."""
MACHINE_S = 90.0
ENVIRONMENT_S = 270.0
START_S = 120.0
"""Until a machine runs our commands, its environment is there, and Ray, engine and policy stand
(assumptions). Weights are downloaded during the last."""


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
    waited_s: float
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


def network_of(target: str, gpu: str) -> float:
    """Gbit/s between nodes that the target is taken to have; 100 where that is not said."""
    rates = TARGETS[target].network_gbit_s
    return rates.get(gpu, rates[""]) or 100.0


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
    priced, recipe = [], with_resources(recipe)
    most = recipe.budget.max_hourly_usd or math.inf
    for target, gpu, need, row in possible_places(recipe, catalogs, targets):
        can = TARGETS[target]
        if can.sold and not row:
            continue
        if row and lacks_ram(recipe, row):
            continue
        network = network_gbit_s or network_of(target, gpu)
        step = step_time(recipe, gpu, network, need)
        stretch = stretched_steps(recipe, gpu, network, need, step) if ranges else ()
        for spot in markets(recipe, target):
            hourly = (row.spot if spot else row.on_demand) if row else None
            if (row and hourly is None) or (hourly or 0.0) * recipe.cluster.gpus_per_node > most:
                continue
            priced.append(_offer(recipe, target, gpu, spot, hourly, step, need, stretch))
    return sorted(priced, key=lambda o: (o.usd is None, o.usd or o.hours))


def node_prices(recipe: Recipe, target: str, catalogs: Path | None = None) -> list[tuple[float, str, bool]]:
    """(Dollars per node and hour, GPU, spot) of what the target may rent and has a known price; cheapest
    first."""
    prices = []
    for name in target_members(recipe, target):
        for gpu in TARGETS[name].gpus_for(recipe) if recipe.cluster.gpus_per_node else []:
            row = gpu_row(recipe, name, gpu, catalogs)
            if row is None:
                continue
            for spot in markets(recipe, name):
                usd = row.spot if spot else row.on_demand
                if usd is not None:
                    prices.append((usd * recipe.cluster.gpus_per_node, gpu, spot))
    return sorted(prices)


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
    # Each group of machines is a job of its own, and may find another cloud.
    return [member.name for member in members if not member.refusal(recipe)]


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


def ready_seconds(download_s: float) -> float:
    """Seconds from a launch or a loss to the next step, with so long a download."""
    return MACHINE_S + ENVIRONMENT_S + max(START_S, download_s)


def _offer(
    recipe: Recipe,
    target: str,
    gpu: str,
    spot: bool,
    hourly: float | None,
    step: StepTime,
    need: MemoryPlan,
    stretch: tuple[float, ...],
) -> Offer:
    config, cluster = recipe.config, recipe.cluster
    steps = steps_of(recipe)
    work = steps * (step.total - step.checkpoint)
    disk = target_named(target).disk
    stall = stall_seconds(recipe, need, gpu_named(gpu))
    between = config.checkpoint.mean_time_between_preemptions_s if spot else math.inf
    # a save is of use only once it is in the bucket
    upload = save_seconds(recipe, need, disk)
    if config.checkpoint.every_steps:
        interval = config.checkpoint.every_steps * (step.total - step.checkpoint)
    else:
        best = save_interval_s(stall, config.checkpoint.mean_time_between_preemptions_s)
        interval = max(step.total, best, upload)
    speed = DOWNLOAD_BYTES_S * (cluster.nodes if nodes_share_weights(config) else 1)
    base = need.shape.parameters * 2 / speed
    teacher = hub_config.teacher_shape(config)
    judge = teacher.parameters * 2 / speed if teacher else 0.0
    start = ready_seconds(base + judge)
    waited = ready_seconds((judge if checkpoint_suffices(config) else base + judge) + upload)
    lost = waited + upload  # what was being uploaded is lost
    seconds = start + expected_seconds(work, interval, stall, lost, between)
    disk_usd = disk.usd_per_hour(cluster.disk_gib) if disk else 0.0
    usd_per_hour = None if hourly is None else (hourly * cluster.gpus_per_node + disk_usd) * cluster.nodes
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
        waited,
        cluster.nodes,
        need.shape.vision is not None,
        recipe.config.method == "sft" and recipe.cluster.nodes > 1,
        stretch,
    )


@dataclass(frozen=True)
class HourlyPrice:
    """What the machines of a recipe cost on one target."""

    usd: float
    """Dollars per hour, all nodes."""
    target: str
    """Where."""
    gpu: str
    """The GPU of its machines."""
    spot: bool
    """Whether it is a price of spot machines."""
    most_usd: float | None
    """What a check, which ends within its hours, costs at most, without start and set-up; None: no check."""


def prices_of(recipe: Recipe, targets: list[str], catalogs: Path) -> list[HourlyPrice]:
    """Every target's known prices, cheapest first."""
    priced = []
    for target in targets:
        if target_named(target).chooses:  # it chooses among the others
            continue
        for usd, gpu, spot in node_prices(recipe, target, catalogs):
            hourly = usd * recipe.cluster.nodes
            most = hourly * recipe.budget.max_hours if recipe.kind == "check" else None
            priced.append(HourlyPrice(hourly, target, gpu, spot, most))
    return sorted(priced, key=lambda price: (price.usd, price.target, price.gpu, price.spot))


def cheapest_machines(sampling: Recipe, target: str, catalogs: Path | None = None) -> HourlyPrice | None:
    """The cheapest machines of a sampling group on a target, all of them, that have the memory for it, in GPU
    and RAM, and keep to the budget's dollars per node."""
    sampling = with_resources(sampling)
    most = sampling.budget.max_hourly_usd or math.inf
    rates = []
    for _, gpu, _, row in possible_places(sampling, catalogs, [target]):
        if row is None or lacks_ram(sampling, row):
            continue
        for spot in markets(sampling, target):
            usd = ((row.spot if spot else row.on_demand) or math.inf) * sampling.cluster.gpus_per_node
            if usd <= most and usd < math.inf:
                rates.append(HourlyPrice(usd * sampling.jobs, target, gpu, spot, None))
    return min(rates, key=lambda rate: rate.usd, default=None)


def short_of_ram(recipe: Recipe, catalogs: Path | None = None, targets: list[str] | None = None) -> list[str]:
    """A line for every machine that has the GPUs but not the RAM that the recipe asks for."""
    recipe = with_resources(recipe)
    wanted_gib = recipe.cluster.memory_gib
    lines = []
    for target, gpu, _, row in possible_places(recipe, catalogs, targets):
        if row and lacks_ram(recipe, row):
            lines.append(
                f"{target}, {gpu}: {row.host_gib:g} GiB of RAM come with a GPU,"
                f" {wanted_gib} GiB are asked for per node"
            )
    return lines
