"""What `plan` answers, as facts: the screen shows them, and `plan --json` prints them under the names that
they have here (docs/memory.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from recipes.capabilities import CAPABILITIES
from recipes.plan import allocated, cost, offer_choice, prices, spread, start_time
from recipes.plan.cheaper import CheaperChange
from recipes.plan.hourly import HourlyPrice
from recipes.recipe.resolved import GIB, MemoryPlan
from recipes.recipe.spec import Recipe
from recipes.screens.recipe_list import machine_shape

SCHEMA = 1
"""Goes up when a name of the answer goes or changes its meaning; new names leave it."""
PHASES = ("images", "rollout", "logprobs", "update", "sync", "checkpoint", "phases")
"""A step's, in order: the fields of StepTime."""
TITLES = {"phases": "start of each"}


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
    """Expected, preemptions included."""
    hours_10: float
    """Within which a tenth of the simulated runs end."""
    hours_90: float
    """Within which nine tenths end."""
    usd: float | None
    """Expected dollars of the run."""
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
    allocated_gib: dict[str, float]
    """By phase, on a device that computes nothing; {} of a recipe that was not run on it as it is planned."""
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
    hourly: list[HourlyPrice]
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


def plan_facts(
    recipe: Recipe,
    need: MemoryPlan | None,
    offers: list[cost.Offer],
    taken: cost.Offer | None,
    targets: list[str],
    asked: str | None,
    cheaper: list[CheaperChange],
    hourly: list[HourlyPrice],
    problem: str,
    cure: str,
    remarks: list[str],
    limits: PlanLimits | None,
) -> PlanFacts:
    """Puts what was planned into words. taken: the offer that `up` takes. targets: those that can be driven
    from here. asked: the target that was named. problem, cure: why it does not fit, and what makes it fit; ""
    where it does."""
    expected = recipe.config.expected
    rate = next((one for one in hourly if one.target in targets), None)
    verdict = f"does not fit: {problem}. Cheapest change that makes it fit: {cure}"
    if not problem:
        verdict = _verdict(recipe, need, _price(taken, rate, asked), limits)
    by_phase = {phase.name: phase.total / GIB for phase in need.phases} if need else {}
    allocated_gib = {}
    if need:
        for phase, one in allocated.beside(recipe.name, need).items():
            allocated_gib[phase] = one.tensors
    seconds = {phase: getattr(taken.step, phase) for phase in PHASES} if taken else {}
    return PlanFacts(
        recipe=recipe.name,
        description=recipe.description,
        machines=machine_shape(recipe),
        fits=None if need is None else not problem,
        verdict=verdict,
        problem=problem,
        cure=cure,
        gpu=need.gpu if need else "",
        gpu_gib=need.gpu_bytes / GIB if need else None,
        memory_gib=by_phase,
        allocated_gib=allocated_gib,
        tightest=need.peak.name if need else "",
        host_gib=need.host_bytes / GIB if need else None,
        disk_gib=need.disk_bytes / GIB if need else None,
        steps=offers[0].steps if offers else None,
        step_s=seconds,
        offers=[planned_offer(offer) for offer in offers],
        taken=planned_offer(taken) if taken else None,
        why=_why(taken, offers, asked),
        cheaper=cheaper,
        hourly=hourly,
        assumptions=_assumptions(recipe, taken or next(iter(offers), None)),
        remarks=remarks,
        expected=[f"{band} ({band.source})" for band in expected.bands],
        not_promised=expected.not_promised,
        limits=limits,
    )


def planned_offer(offer: cost.Offer) -> PlannedOffer:
    """An offer with its simulated range, in which the plan's own figure lies."""
    judged = offer_choice.judge_offer(offer, math.inf, math.inf)
    # Draws are skewed: the plan's own figure may lie below their tenth.
    least, most = min(judged.least, offer.hours), max(judged.hours, offer.hours)
    rate = offer.usd_per_hour
    return PlannedOffer(
        target=offer.target,
        gpu=offer.gpu,
        market=market_name(offer),
        usd_per_hour=rate,
        step_s=offer.step.total,
        hours=offer.hours,
        hours_10=least,
        hours_90=most,
        usd=offer.usd,
        usd_10=None if rate is None else least * rate,
        usd_90=None if rate is None else most * rate,
        preemptions=offer.preemptions,
    )


def market_name(offer: cost.Offer) -> str:
    """How its machines are had, in a word."""
    if offer.usd_per_hour is None and not offer.spot:
        return "yours"
    return cost.market_of(offer.spot)


def _price(taken: cost.Offer | None, rate: HourlyPrice | None, asked: str | None) -> str:
    """What the machines cost that are taken."""
    if taken:
        usd = "" if taken.usd is None else f", ${taken.usd:,.0f}"
        return f"{taken.target}, {taken.gpu} {market_name(taken)}: {taken.hours:.1f} h{usd}"
    if rate:
        return f"${rate.usd:.2f} an hour on {rate.target}"
    return f"no price is known of {asked or 'its machines'}"


def _verdict(recipe: Recipe, need: MemoryPlan | None, price: str, limits: PlanLimits | None) -> str:
    """The verdict on what fits, or needs no GPU."""
    if need is None and not recipe.cluster.gpus_per_node:
        return f"needs no GPU: {machine_shape(recipe)}"
    if need is None:
        return f"holds no model: {price}"
    spare = (need.gpu_bytes - need.peak.total) / GIB
    room = f"{spare:.1f} of {need.gpu_bytes / GIB:.1f} GiB to spare ({need.peak.name})"
    if limits and not limits.kept:
        return f"fits with {room}, but no offer keeps the limits"
    return f"fits with {room}; {price}"


def _why(taken: cost.Offer | None, offers: list[cost.Offer], asked: str | None) -> str:
    """Why `up` takes that one; "" where it takes none of them."""
    if taken is None:
        none = "`up` needs a --target: no machines with a known price can be driven from here"
        return none if offers else ""
    if asked:
        return f"named with --target, its cheapest{'' if taken.usd is not None else ' in hours'}"
    return "the cheapest that can be driven from here"


def _assumptions(recipe: Recipe, offer: cost.Offer | None) -> list[str]:
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
        can = CAPABILITIES[offer.target].network_gbit_s
        data += f"; {can.get(offer.gpu, can['']) or 100.0:g} Gb/s between nodes of {offer.target}"
    slow = f"the slowest published step is {offer.published_end:g} times its plan"
    slow += "; --deadline and --budget count with it"
    pull = start_time.pull_seconds(recipe.cluster.image)
    took, runs = start_time.start_seconds(offer.target, pull is not None)
    seconds = took if runs else start_time.Restart(0.0, 0.0, pull=pull).total()
    known = f" ({runs} runs from here)" if runs else ""
    dates = sorted(row.read for row in prices.price_snapshot())
    read = f"prices of {dates[0]} to {dates[-1]} or SkyPilot's catalog"
    return [data, ranges, slow, f"{seconds:.0f} s to the first step{known}; {read}"]
