"""What `plan` answers, as facts: the screen shows them, and `plan --json` prints them under the names that
they have here (docs/memory.md)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from recipes.plan import (
    choice,
    cost,
    memory,
    offer_choice,
    prices,
    sizing,
    spread,
)
from recipes.plan.cheaper import CheaperChange, cheaper_changes
from recipes.platforms.targets import targets_for
from recipes.recipe import sample_group
from recipes.recipe.resolved import GIB, MemoryPlan
from recipes.recipe.spec import Recipe

SCHEMA = 3
"""Goes up when a name of the answer goes or changes its meaning; new names leave it."""


@dataclass(frozen=True)
class PlannedOffer:
    """One way to run the recipe."""

    target: str
    """Where."""
    gpu: str
    """Its GPUs."""
    market: str
    """spot, on demand, or yours: machines of your own."""
    usd_per_hour: float | None
    """All nodes; null for machines of your own, as all dollars."""
    step_s: float
    """Seconds of a whole step."""
    hours: float
    """As planned, preemptions included: nothing is slower than the plan, and no completion longer."""
    hours_50: float
    """Likely: within which half of the simulated runs end."""
    hours_10: float
    """Within which a tenth of the simulated runs end."""
    hours_90: float
    """Within which nine tenths end."""
    usd: float | None
    """Dollars at hours."""
    usd_50: float | None
    """Likely: dollars at hours_50."""
    usd_10: float | None
    """Dollars at hours_10."""
    usd_90: float | None
    """Dollars at hours_90."""
    preemptions: float
    """Expected number."""


@dataclass(frozen=True)
class PlanLimits:
    """What --deadline and --budget asked for."""

    deadline_hours: float | None
    """Null if none was given."""
    budget_usd: float | None
    """The same."""
    kept: bool
    """Whether an offer keeps them."""
    said: list[str]
    """The offer that does, what it gives up, or what would keep them."""


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """Figures in the units of their names; GiB and seconds are of one GPU and of one step."""

    schema: int = SCHEMA
    """Goes up when a name goes or changes its meaning."""
    recipe: str
    """Its name."""
    description: str
    """In a sentence."""
    machines: str
    """Nodes and GPUs in a word."""
    fits: bool | None
    """Whether the model fits the GPUs; null where it needs none."""
    verdict: str
    """In one line, with what it would cost."""
    problem: str
    """Why it does not fit."""
    cure: str
    """The cheapest change that makes it fit."""
    gpu: str
    """That memory_gib is planned for."""
    gpu_gib: float | None
    """That GPU's memory."""
    memory_gib: dict[str, float]
    """By phase, in order."""
    tightest: str
    """The phase that needs most."""
    host_gib: float | None
    """RAM of a node."""
    disk_gib: float | None
    """Disk of a node."""
    steps: int | None
    """Steps of the run."""
    step_s: dict[str, float]
    """By phase, of the offer that is taken."""
    offers: list[PlannedOffer]
    """All, cheapest first, machines of your own last."""
    taken: PlannedOffer | None
    """The one that `up` takes."""
    why: str
    """Why that one."""
    cheaper: list[CheaperChange]
    """What would make it cheaper."""
    hourly: list[cost.HourlyPrice]
    """Prices of a recipe that trains nothing, cheapest first."""
    assumptions: list[str]
    """Sentences."""
    remarks: list[str]
    """Warnings, what was left out, and what is planned of other machines."""
    expected: list[str]
    """Bands of metrics that the recipe promises."""
    not_promised: str
    """A sentence on what is not."""
    limits: PlanLimits | None = field(default=None)
    """What --deadline and --budget asked for; null without them."""


Plan = tuple[PlanFacts, MemoryPlan | None, MemoryPlan | None]
"""The facts for programs; what `--all` has besides: memory of the run's machines and of its second group."""
Where = tuple[Path, list[str] | None]
"""SkyPilot's catalogs, and the targets that were named; None: any."""


def make_plan(
    recipe: Recipe,
    offers: list[cost.Offer],
    target: str | None,
    where: Where,
    network_gbit_s: float | None,
    limits: PlanLimits | None,
) -> Plan:
    """Plans a recipe once. offers: its own. target: the one that was named. limits: what --deadline and
    --budget asked for."""
    catalogs, named = where
    need = memory.plan_memory(recipe)
    view = sample_group.sampling_machines(recipe) if recipe.kind != "sample" else None
    sampling = memory.plan_memory(view) if view else None
    targets = named or choice.driven_targets(recipe)
    taken = choice.taken_offer(offers, targets) or (next(iter(offers), None) if target else None)
    shown = planned_offer(taken) if taken else None
    better = []
    if need and taken:
        better = cheaper_changes(recipe, taken, offers, targets, network_gbit_s, catalogs)
    per_hour = []
    if recipe.kind != "train":
        per_hour = cost.prices_of(recipe, named or targets_for(recipe), catalogs)

    problem = cure = ""
    if need and not need.fits:
        problem, cure = need.problem, sizing.advice(recipe)
    elif sampling and not sampling.fits:
        problem = f"the second group: {sampling.problem}"
        cure = "GPUs with more memory, or more of them in an engine (sample.tensor_parallel)"
    price = f"no price is known of {target or 'its machines'}"
    if shown:
        price = f"{shown.target}, {shown.gpu} {shown.market}: {likely_range(shown)}"
    elif rate := next((row for row in per_hour if row.target in targets), None):
        price = f"${rate.usd:.2f} an hour on {rate.target}"
    verdict = _verdict(recipe, need, shown, price, limits)
    if problem:
        verdict = f"does not fit: {problem}. Cheapest change that makes it fit: {cure}"

    expected = recipe.config.expected
    bands = [f"{band} ({band.source})" for band in expected.bands]
    phases = need.phases if need else []
    facts = PlanFacts(
        recipe=recipe.name,
        description=recipe.description,
        machines=sample_group.machine_shape(recipe),
        fits=None if need is None else not problem,
        verdict=verdict,
        problem=problem,
        cure=cure,
        gpu=need.gpu if need else "",
        gpu_gib=need.gpu_bytes / GIB if need else None,
        memory_gib={phase.name: phase.total / GIB for phase in phases},
        tightest=need.peak.name if need else "",
        host_gib=need.host_bytes / GIB if need else None,
        disk_gib=need.disk_bytes / GIB if need else None,
        steps=offers[0].steps if offers else None,
        step_s=asdict(taken.step) if taken else {},
        offers=list(map(planned_offer, offers)),
        taken=shown,
        why=_why(taken, offers, target),
        cheaper=better,
        hourly=per_hour,
        assumptions=_assumptions(recipe, taken or next(iter(offers), None), network_gbit_s),
        remarks=_remarks(recipe, shown, sampling, where),
        expected=bands,
        not_promised=expected.not_promised,
        limits=limits,
    )
    return facts, need, sampling


def _remarks(
    recipe: Recipe, taken: PlannedOffer | None, sampling: MemoryPlan | None, where: Where
) -> list[str]:
    """What speaks against the plan, what it leaves out, and what other machines need."""
    lines = []
    most = recipe.budget.max_hours
    if taken and taken.hours_90 > most:
        enough = math.ceil(taken.hours_90)
        lines.append(
            f"budget.max_hours ends it at {most:g} h; nine in ten such runs end within {enough}:"
            f" --set budget.max_hours={enough}"
        )
    if recipe.dataset.guess and not recipe.config.run.max_steps:
        lines.append(recipe.dataset.guess)
    if sampling and recipe.sample:
        machines = sample_group.describe_machines(recipe.sample)
        room = f"{sampling.peak.total / GIB:.1f} of {sampling.gpu_bytes / GIB:.1f} GiB a GPU"
        cache = f"KV cache of {sampling.kv_cache_tokens:,} tokens"
        lines.append(f"second group: {machines}, {room}, {cache} (--fleet: hours and dollars of both)")
    fleet = recipe.config.fleet
    if recipe.kind == "train" and fleet.workers == "only":
        lines.append(
            "rollout workers sample for this run: its hours and dollars above are those of engines on its own"
            " GPUs; `python3 launch.py plan RECIPE --fleet` has those with workers"
        )
    return [*lines, *(f"left out: {line}" for line in cost.short_of_ram(recipe, *where))]


def planned_offer(offer: cost.Offer) -> PlannedOffer:
    """An offer with its simulated range, in which the plan's own figure lies."""
    judged = offer_choice.judge_offer(offer, math.inf, math.inf)
    # Draws are skewed: the plan's own figure may lie below their tenth.
    least, most = min(judged.least, offer.hours), max(judged.hours, offer.hours)
    rate = offer.usd_per_hour
    yours = rate is None and not offer.spot
    return PlannedOffer(
        target=offer.target,
        gpu=offer.gpu,
        market="yours" if yours else cost.market_of(offer.spot),
        usd_per_hour=rate,
        step_s=offer.step.total,
        hours=offer.hours,
        hours_50=judged.median,
        hours_10=least,
        hours_90=most,
        usd=offer.usd,
        usd_50=None if rate is None else judged.median * rate,
        usd_10=None if rate is None else least * rate,
        usd_90=None if rate is None else most * rate,
        preemptions=offer.preemptions,
    )


def likely_range(offer: PlannedOffer) -> str:
    """What a run there is likely to take and cost, and between what eight in ten such runs lie."""
    hours = f"{_hours(offer.hours_50)} h ({_hours(offer.hours_10)}-{_hours(offer.hours_90)})"
    if offer.usd_50 is None:
        return hours
    return f"{hours}, ${offer.usd_50:,.0f} ({offer.usd_10:,.0f}-{offer.usd_90:,.0f})"


def _hours(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def _verdict(
    recipe: Recipe,
    need: MemoryPlan | None,
    taken: PlannedOffer | None,
    price: str,
    limits: PlanLimits | None,
) -> str:
    """The verdict on what fits, or needs no GPU; that a run is likely to be ended before it is done."""
    if need is None and not recipe.cluster.gpus_per_node:
        return f"needs no GPU: {sample_group.machine_shape(recipe)}"
    if need is None:
        return f"holds no model: {price}"
    room = f"fits with {(need.gpu_bytes - need.peak.total) / GIB:.1f} GiB to spare"
    if limits and not limits.kept:
        return f"{room}, but no offer keeps the limits"
    most = recipe.budget.max_hours
    if taken and taken.hours_50 > most:
        takes = f"{taken.target} likely takes {_hours(taken.hours_50)} h"
        return f"fits, but {takes}, and budget.max_hours ends it for good at {most:g} h"
    return f"{room}; {price}"


def _why(taken: cost.Offer | None, offers: list[cost.Offer], named: str | None) -> str:
    """Why `up` takes that one; "" where it takes none of them."""
    if taken is None:
        none = "`up` needs a --target: no machines with a known price can be driven from here"
        return none if offers else ""
    if named:
        return f"named with --target, its cheapest{'' if taken.usd is not None else ' in hours'}"
    missing = choice.missing_here(taken.target)
    return (
        f"the cheapest; first it needs {missing}" if missing else "the cheapest that can be driven from here"
    )


def _assumptions(recipe: Recipe, offer: cost.Offer | None, network_gbit_s: float | None) -> list[str]:
    """Those that move hours and dollars most."""
    if offer is None:
        return []
    tokens = recipe.dataset.answer_tokens
    low, high = offer.step_bounds
    ranges = f"10-90%: steps of {low:.2f} to {high:.2f} times the plan"
    if recipe.config.method == "sft":
        data = f"solutions of {tokens:,} tokens"
    else:
        limit = recipe.config.rollout.max_tokens
        data = f"completions of {tokens:,} tokens, of {limit:,} allowed"
        ends = [min(limit, round(tokens * factor)) for factor in spread.COMPLETIONS]
        ranges += f", completions of {ends[0]:,} to {ends[1]:,} tokens"
    ranges += ", lost machines"
    if recipe.cluster.nodes > 1:
        whose = "as given" if network_gbit_s else f"of {offer.target}"
        rate = network_gbit_s or cost.network_of(offer.target, offer.gpu)
        data += f"; {rate:g} Gb/s between nodes {whose}"
    lines = [data, ranges]
    if offer.vision:
        lines.append(
            f"{high:.2f}: what others published of such steps;"
            " no card has run this code since its host time fell"
        )
    slow = f"the slowest published step is {offer.published_end:g} times its plan"
    slow += "; --deadline and --budget count with it"
    dates = sorted(row.read for row in prices.price_snapshot())
    read = f"prices of {dates[0]} to {dates[-1]} or SkyPilot's catalog"
    return [*lines, slow, f"{cost.ready_seconds(0.0):.0f} s to the first step; {read}"]
