"""Seconds and dollars of a step where rollout workers sample it, beside those of a run that samples by
itself.

The trainer's updates and a worker's decoding take what the plan says they take (`cost.py`); here is only how
they wait for each other. A model with stated assumptions, not a measurement: no worker has run on a GPU.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from recipes.plan import cost, memory, passes, step_seconds
from recipes.plan.passes import Passes
from recipes.platforms.targets import TARGETS, targets_for
from recipes.recipe import sample_group
from recipes.recipe.resolved import MemoryPlan
from recipes.recipe.spec import Recipe, SampleGroup, override, without_rollouts
from trainer.config import ConfigError, RunConfig
from trainer.config.budget import trained
from trainer.hardware.gpus import GPUS, gpu_named
from trainer.hardware.model_shapes import Shape

PATCHES = ((5e-7, 0.0068), (1e-6, 0.0117), (3e-6, 0.0301))
"""Learning rate, and bytes of a step's patch for each parameter: the format of `trainer/fleet/patch.py` on
32 million bf16 weights of spread 0.02 at Adam's eighth step on noise with a tenth of signal (measured). Real
gradients may make up to 0.035 at 1e-6."""
FP32_PATCH = 2.4
"""The same of fp32 weights, which change in every element: 2.1 to 2.4 (measured on the demo)."""
ENCODE_BYTES_S, APPLY_BYTES_S = 1.0e9, 4.0e9
"""Weights that one core compares, and patches, in a second, at 1e-6 (measured)."""
FETCH_BYTES_S = 125e6
"""What a worker reads from the bucket, or writes there, in a second, 1 Gbit/s (assumption)."""
POLL_S = 2.0
"""A version is announced and a unit is mailed in objects that are each looked at once a second."""
MOST_AHEAD = 8
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Workers that are tried."""
UNITS = (8, 16, 32, 64, 128, 256)
"""Prompts of a unit that are tried, beside the whole step."""
LEAST_SEQUENCES = 8
"""Longest sequences that a worker's KV cache must hold."""
EGRESS_USD_PER_GB = {"s3": 0.09, "gs": 0.12, "r2": 0.0, "file": 0.0}
"""List prices of what leaves a store for the internet, first tier, 2026; requests are left out."""
STORE_CLOUD = {"s3": "aws", "gs": "gcp"}
"""The cloud whose machines read a store for nothing, in the bucket's own region."""


@dataclass(frozen=True)
class WorkerKind:
    """One kind of rollout worker: an engine on a machine of its own."""

    gpu: str
    gpus: int
    """GPUs of one engine."""
    target: str
    spot: bool
    usd_per_hour: float
    recipe: Recipe
    """The view of the group, with one machine of one engine."""
    need: MemoryPlan

    @property
    def name(self) -> str:
        """Its GPUs in a word."""
        return self.gpu if self.gpus == 1 else f"{self.gpus}x{self.gpu}"


@dataclass(frozen=True)
class FleetRow:
    """One way to run a recipe: colocated without a worker, else with `count` of them."""

    offer: cost.Offer
    """The trainer's machines."""
    gpus: int
    """GPUs of the trainer, all nodes."""
    step_s: float
    worker: WorkerKind | None = None
    count: int = 0
    ahead: int = 0
    """Steps that sampling is ahead of learning, `rollout.staleness`."""
    enough: int = 0
    """The fewest steps ahead at which the trainer need not wait for the longest completion."""
    unit_prompts: int = 0
    egress_usd: float = 0.0
    """Dollars of a step for what workers read of the bucket."""

    @property
    def trainer(self) -> str:
        """The trainer's GPUs in a word."""
        return f"{self.gpus} x {self.offer.gpu}"

    @property
    def usd_per_hour(self) -> float:
        """All machines."""
        workers = self.count * self.worker.usd_per_hour if self.worker else 0.0
        return (self.offer.usd_per_hour or 0.0) + workers

    @property
    def usd(self) -> float:
        """Dollars of a step, egress included."""
        return self.usd_per_hour * self.step_s / 3600 + self.egress_usd

    @property
    def hours(self) -> float:
        """Expected hours of the run, the trainer's preemptions included."""
        if self.worker is None:
            return self.offer.hours
        o = self.offer
        work = o.steps * (self.step_s - o.step.checkpoint)
        work_s = cost.expected_seconds(work, o.interval_s, o.stall_s, o.restart_s, o.between_s)
        return (o.start_s + work_s) / 3600

    @property
    def run_usd(self) -> float:
        """Expected dollars of the run."""
        return self.hours * self.usd_per_hour + self.offer.steps * self.egress_usd


def patch_rate(config: RunConfig) -> float:
    """Bytes of a step's patch for each trained parameter, between the measured rates on a straight line of
    logarithms."""
    if config.model.dtype != "bf16":
        return FP32_PATCH
    rate = max(config.optimizer.learning_rate, 1e-9)
    pairs = list(pairwise(PATCHES))
    reaching = [pair for pair in pairs if rate <= pair[1][0]]
    (rate_0, patch_0), (rate_1, patch_1) = reaching[0] if reaching else pairs[-1]
    slope = math.log(patch_1 / patch_0) / math.log(rate_1 / rate_0)
    return min(2.0, patch_0 * (rate / rate_0) ** slope)


def steps_enough(latency_s: float, sync_s: float, update_s: float) -> int:
    """The fewest steps ahead at which the longest completion is there when the trainer wants it."""
    return math.ceil((latency_s + sync_s) / update_s)


def fleet_step_seconds(
    units: Sequence[float], workers: int, ahead: int, update_s: float, switch_s: float
) -> float:
    """Mean seconds of a step, by its units' seconds, of which the head gives each to the worker that is free
    first: the longest of an update, of what every worker has to do, and of a round in which a version is
    announced (POLL_S), loaded (`switch_s`), sampled with and learned from, `ahead` + 1 steps at once. It
    agrees with the schedule played step by step to 1% in 95 of 100 rows of the presets, and to 14% in all."""
    free = [0.0] * workers
    for seconds in units:
        heapq.heapreplace(free, free[0] + seconds)
    round_s = POLL_S + switch_s + max(free) + update_s
    if not ahead:
        return round_s
    busy_s = (sum(units) + min(len(units), workers) * switch_s) / workers
    return max(update_s, busy_s, round_s / (ahead + 1))


def unit_seconds(worker: WorkerKind, shape: Shape, step: Passes, prompts: int) -> list[float]:
    """Seconds in which a worker samples each unit of a step, of so many prompts, by the plan's own model of
    an engine."""
    card = gpu_named(worker.gpu)
    seconds = []
    size = prompts * worker.recipe.config.rollout.samples_per_prompt  # the lengths are in order of prompts
    for start in range(0, len(step.lengths), size):
        unit = Passes(step.lengths[start : start + size], (), (), 0)
        seconds.append(step_seconds.rollout_seconds(worker.recipe, shape, card, worker.need, unit))
    return seconds


def update_seconds(recipe: Recipe, shape: Shape, step: step_seconds.StepTime) -> float:
    """Seconds of a step in which a trainer without engines learns and publishes."""
    patch = patch_rate(recipe.config) * trained(recipe.config, shape)
    compared = 2 * trained(recipe.config, shape) / recipe.config.placement.world_size / ENCODE_BYTES_S
    publish = compared + patch / recipe.cluster.nodes / step_seconds.UPLOAD_BYTES_S
    return step.logprobs + step.update + step.checkpoint + publish


def switch_seconds(recipe: Recipe, shape: Shape, worker: WorkerKind) -> float:
    """Seconds in which a worker reads a patch, applies it and loads the weights into its engine. They reach
    the first GPU of an engine from the host, and the others from there."""
    patch = patch_rate(recipe.config) * trained(recipe.config, shape)
    whole = 2.0 * shape.parameters
    card = gpu_named(worker.gpu)
    load = whole / (card.pcie_gb_per_s * 1e9)
    if worker.gpus > 1:
        load += whole / (card.nvlink_gb_per_s * 1e9)
    return patch / FETCH_BYTES_S + whole / APPLY_BYTES_S + load


def worker_kinds(recipe: Recipe, catalogs: Path | None, targets: list[str] | None) -> list[WorkerKind]:
    """A worker of every GPU that holds the model and has a known price, on the fewest GPUs that do; those of
    the recipe's second group, where it names one."""
    kinds = []
    named = recipe.sample
    sizes = (1, 2, 4, 8) if named is None else (named.engine_gpus(recipe.config.rollout.tensor_parallel),)
    for gpu in (named.gpu, *named.alternatives) if named else GPUS:
        for gpus in sizes:
            group = replace(named or SampleGroup(), gpu=gpu, alternatives=(), nodes=1)
            engine = _engine(recipe, replace(group, gpus_per_node=gpus, tensor_parallel=gpus))
            if engine is None:
                continue
            places = [target for target in targets or targets_for(engine[0]) if target != "skypilot"]
            rates = filter(None, (cost.cheapest_machines(engine[0], target, catalogs) for target in places))
            if rate := min(rates, key=lambda rate: rate.usd, default=None):
                kinds.append(WorkerKind(gpu, gpus, rate.target, rate.spot, rate.usd, *engine))
            break
    return kinds


def _engine(recipe: Recipe, group: SampleGroup) -> tuple[Recipe, MemoryPlan] | None:
    """A machine of one engine, and what that needs; None where it does not hold the model and some
    sequences."""
    view = sample_group.sampling_machines(replace(recipe, sample=group))
    need = memory.plan_memory(view) if view else None
    if view is None or need is None or not need.fits or need.shape.heads % group.tensor_parallel:
        return None
    enough = need.kv_cache_tokens >= LEAST_SEQUENCES * view.config.longest_sequence
    return (view, need) if enough else None


def fleet_refusal(recipe: Recipe) -> str:
    """Why no worker could sample for a recipe; empty if they could."""
    if why := without_rollouts(recipe):
        return why
    if not recipe.cluster.gpus_per_node:
        return f"{recipe.name} runs on CPU workers"
    if not recipe.config.loads_policy:
        return "an evaluation has no steps whose seconds could be planned"
    if recipe.config.turns.environment != "off":
        return "workers sample one turn alone: set turns.environment to off to see what workers bring"
    if recipe.config.fleet.gpus_per_node:
        return "no time is planned of GPUs of the run's own nodes that sample (fleet.gpus_per_node)"
    if recipe.config.rollout.tokens_per_step:
        return "workers carry no completion over: set rollout.tokens_per_step to 0 to see what workers bring"
    return ""


@dataclass(frozen=True)
class Fleets:
    """All ways that were planned."""

    colocated: list[FleetRow]
    """Runs without workers, by GPU, the cheapest step first; none where no machine holds engines too."""
    fleets: list[FleetRow]
    """Runs with workers; where the recipe names its machines, in units as it says."""
    tried: list[FleetRow]
    """These, and the same in other units."""

    def cheapest(self) -> list[FleetRow]:
        """The cheapest run with each kind of machines, cheapest step first."""
        by_pair: dict[tuple[str, str], list[FleetRow]] = {}
        for row in self.fleets:
            if row.worker:
                by_pair.setdefault((row.trainer, row.worker.name), []).append(row)
        best = [fewest_ahead(of_pair, lambda row: row.usd) for of_pair in by_pair.values()]
        return sorted(best, key=lambda row: row.usd)

    def beaten_by(self, row: FleetRow) -> FleetRow | None:
        """A run without workers that is as fast and costs as little; then the workers are a loss."""
        better = [run for run in self.colocated if run.step_s <= row.step_s and run.usd <= row.usd]
        return min(better, key=lambda run: run.usd, default=None)

    def taken(self, hours: float, usd: float) -> FleetRow | None:
        """The cheapest run that is no loss and is expected to keep the limits; with few steps ahead, where
        dollars are about the same."""
        kept = []
        for row in (*self.colocated, *self.fleets):
            within = row.hours <= hours and row.run_usd <= usd
            if within and not (row.worker and self.beaten_by(row)):
                kept.append(row)
        return fewest_ahead(kept, lambda row: row.run_usd) if kept else None

    def better_unit(self, row: FleetRow) -> FleetRow | None:
        """The same machines with the unit that is quickest, the largest of those within a hundredth; None
        where that saves less than a twentieth of a step."""
        machines = (row.offer, row.worker, row.count, row.ahead)
        same = [run for run in self.tried if (run.offer, run.worker, run.count, run.ahead) == machines]
        most_s = 1.01 * min(run.step_s for run in same)
        best = max((run for run in same if run.step_s <= most_s), key=lambda run: run.unit_prompts)
        return best if best.step_s < 0.95 * row.step_s else None


def fewest_ahead(rows: Sequence[FleetRow], dollars: Callable[[FleetRow], float]) -> FleetRow:
    """The one with the fewest steps ahead among those that cost within a hundredth of the cheapest."""
    most = 1.01 * min(map(dollars, rows))
    cheap = [row for row in rows if dollars(row) <= most]
    return min(cheap, key=lambda row: (row.ahead, dollars(row)))


def compare_fleets(recipe: Recipe, catalogs: Path | None, targets: list[str] | None) -> Fleets:
    """The recipe's machines alone, and with every kind of worker. Raises ConfigError where none can sample
    for the recipe."""
    if why := fleet_refusal(recipe):
        raise ConfigError(f"--fleet: {why}")
    fleets: list[FleetRow] = []
    trainer = replace(recipe, sample=None)
    alone = _offers(override(trainer, ["fleet.workers=off"]), catalogs, targets)
    gpus, ahead = trainer.config.placement.world_size, recipe.config.rollout.staleness
    colocated = [FleetRow(offer, gpus, offer.step.total, ahead=ahead) for offer in alone]
    workers = worker_kinds(recipe, catalogs, targets)
    group = recipe.sample
    # GPUs that hold no engine beside the learner may still learn from what workers sample.
    for offer in alone or _offers(override(trainer, ["fleet.workers=only"]), catalogs, targets):
        for worker in workers:
            counts = (group.nodes * group.gpus_per_node // worker.gpus,) if group else COUNTS
            fleets += fleets_of(trainer, offer, worker, counts)
    size = _unit(recipe.config)
    shown = [row for row in fleets if row.unit_prompts == size] if group else fleets
    return Fleets(sorted(colocated, key=lambda row: row.usd), shown, fleets)


def _unit(config: RunConfig) -> int:
    """Prompts of a unit as the recipe says: a whole step where it says nothing."""
    return config.fleet.unit_prompts or config.rollout.prompts_per_step


def _offers(recipe: Recipe, catalogs: Path | None, targets: list[str] | None) -> list[cost.Offer]:
    """The cheapest of each GPU."""
    by_gpu: dict[str, cost.Offer] = {}
    for offer in cost.offers(recipe, catalogs, targets):
        if offer.usd is not None:
            by_gpu.setdefault(offer.gpu, offer)
    return list(by_gpu.values())


def store_scheme(recipe: Recipe) -> str:
    """The scheme of the recipe's bucket; s3 where none is named yet."""
    scheme = (recipe.storage.bucket or recipe.config.checkpoint.remote).partition("://")[0]
    return scheme if scheme in EGRESS_USD_PER_GB else "s3"


def egress_per_gb(recipe: Recipe, target: str) -> float:
    """Dollars of a gigabyte from the recipe's store to a target's machines."""
    scheme = store_scheme(recipe)
    return 0.0 if STORE_CLOUD.get(scheme) == TARGETS[target].cloud else EGRESS_USD_PER_GB[scheme]


def fleets_of(
    trainer: Recipe, offer: cost.Offer, worker: WorkerKind, counts: Sequence[int] = COUNTS
) -> list[FleetRow]:
    """One trainer with so many of one kind of worker, by units and by steps ahead, which are the recipe's
    where it has some."""
    shape, config = worker.need.shape, trainer.config
    step = passes.of_step(trainer, shape)
    update, switch = update_seconds(trainer, shape, offer.step), switch_seconds(trainer, shape, worker)
    patch_gb = patch_rate(config) * trained(config, shape) / 1e9
    patch_usd = patch_gb * egress_per_gb(trainer, worker.target)
    prompts = config.rollout.prompts_per_step
    steps_ahead = [config.rollout.staleness] if config.rollout.staleness else range(MOST_AHEAD + 1)
    rows = []
    for size in sorted({min(size, prompts) for size in (*UNITS, prompts, _unit(config))}):
        units = unit_seconds(worker, shape, step, size)
        enough = steps_enough(max(units), POLL_S + switch, update)
        for ahead in steps_ahead:
            for count in counts:
                row = FleetRow(
                    offer,
                    config.placement.world_size,
                    fleet_step_seconds(units, count, ahead, update, switch),
                    worker,
                    count,
                    ahead,
                    enough=enough,
                    unit_prompts=size,
                    egress_usd=count * patch_usd,
                )
                rows.append(row)
    return rows
