"""What `plan` answers, as facts: the screen shows them, and `plan --json` prints them under the names that
they have here (docs/memory.md)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from recipes.plan import (
    allocated,
    choice,
    cost,
    fleet_cost,
    host_and_disk,
    hourly,
    memory,
    offer_choice,
    prices,
    sizing,
    spread,
    start_time,
)
from recipes.plan.cheaper import CheaperChange, cheaper_changes
from recipes.plan.hourly import Hourly, HourlyPrice
from recipes.platforms.targets import TARGETS, targets_for
from recipes.recipe import sample_group
from recipes.recipe.resolved import GIB, MemoryPlan
from recipes.recipe.spec import Recipe
from recipes.screens import fleet_words

SCHEMA = 2
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that `plan` shows: the facts for programs, and what `--all` has besides."""

    facts: PlanFacts
    memory: MemoryPlan | None
    """The run's own machines."""
    sampling: MemoryPlan | None
    """A machine of the second group."""
    rates: list[Hourly]
    """Dollars per hour of both groups, by target."""
    notes: list[str]
    """How long a start and a restart take, and which machines of the second group are short of memory."""


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
    need = memory.plan_memory(recipe)
    catalogs, named = where
    targets = named or choice.driven_targets(recipe)
    taken = choice.taken_offer(offers, targets)
    if target and taken is None:
        taken = next(iter(offers), None)
    better: list[CheaperChange] = []
    if need and taken:
        better = cheaper_changes(recipe, taken, offers, targets, network_gbit_s, catalogs)
    prices_of_hours: list[HourlyPrice] = []
    if recipe.kind != "train":
        prices_of_hours = hourly.prices_of(recipe, named or targets_for(recipe), catalogs)
    view = sample_group.sampling_machines(recipe) if recipe.kind != "sample" else None
    sampling = memory.plan_memory(view) if view else None
    rates = hourly.of_groups(recipe, offers, catalogs, named) if sampling else []
    remarks = [recipe.dataset.guess] if recipe.dataset.guess and not recipe.config.run.max_steps else []
    if sampling:
        remarks.append(_of_second_group(recipe, sampling, rates))
    remarks += _of_workers(recipe, where)
    otherwise = hourly.other_prices(recipe, offers, catalogs)
    if otherwise:
        others = [
            f"{r.cloud} {r.gpu} ${r.other_usd:.2f} (here ${r.on_demand:.2f})" for r in otherwise.values()
        ]
        remarks.append(f"prices by other lists: {', '.join(others)}")
    remarks += [f"left out: {line}" for line in hourly.short_of_ram(recipe, catalogs, named)]
    facts = _facts(
        recipe, need, sampling, offers, taken, targets, target, better, prices_of_hours, network_gbit_s
    )
    facts = replace(facts, remarks=[*facts.remarks, *remarks], limits=limits)
    if limits and not limits.kept and not facts.problem and need:
        facts = replace(facts, verdict=f"{_room(need)}, but no offer keeps the limits")
    notes = _starts(offers)
    notes += [f"{row.cloud} {row.gpu}: here {row.source}; other {row.other}" for row in otherwise.values()]
    replayed = need.host.get("experts to replay", 0.0) if need else 0.0
    if need and replayed:
        tokens = host_and_disk.experts_of_token(need.shape)
        notes.append(
            f"routing replay: {tokens} bytes of chosen experts a token, {replayed / GIB:.2f} GiB a step"
        )
    for line in hourly.short_of_ram(view, catalogs, named) if view else ():
        notes.append(f"left out of the second group: {line}")
    return Plan(facts=facts, memory=need, sampling=sampling, rates=rates, notes=notes)


def _facts(
    recipe: Recipe,
    need: MemoryPlan | None,
    sampling: MemoryPlan | None,
    offers: list[cost.Offer],
    taken: cost.Offer | None,
    targets: list[str],
    named: str | None,
    better: list[CheaperChange],
    rates: list[HourlyPrice],
    network_gbit_s: float | None,
) -> PlanFacts:
    """Puts what was planned into words. taken: the offer that `up` takes. targets: those that can be driven
    from here. named: the target that was."""
    expected = recipe.config.expected
    rate = next((one for one in rates if one.target in targets), None)
    problem, cure = _problem(recipe, need, sampling)
    shown = planned_offer(taken) if taken else None
    verdict = f"does not fit: {problem}. Cheapest change that makes it fit: {cure}"
    if not problem:
        verdict = _verdict(recipe, need, shown, _price(shown, rate, named))
    memory_gib = {phase.name: phase.total / GIB for phase in need.phases} if need else {}
    beside = allocated.beside(recipe.name, need) if need else {}
    allocated_gib = {phase: one.tensors for phase, one in beside.items()}
    seconds = asdict(taken.step) if taken else {}
    bands = [f"{band} ({band.source})" for band in expected.bands]
    return PlanFacts(
        recipe=recipe.name,
        description=recipe.description,
        machines=sample_group.machine_shape(recipe),
        fits=None if need is None else not problem,
        verdict=verdict,
        problem=problem,
        cure=cure,
        gpu=need.gpu if need else "",
        gpu_gib=need.gpu_bytes / GIB if need else None,
        memory_gib=memory_gib,
        allocated_gib=allocated_gib,
        tightest=need.peak.name if need else "",
        host_gib=need.host_bytes / GIB if need else None,
        disk_gib=need.disk_bytes / GIB if need else None,
        steps=offers[0].steps if offers else None,
        step_s=seconds,
        offers=[planned_offer(offer) for offer in offers],
        taken=shown,
        why=_why(taken, offers, named),
        cheaper=better,
        hourly=rates,
        assumptions=_assumptions(recipe, taken or next(iter(offers), None), network_gbit_s),
        remarks=_ended_early(recipe, shown),
        expected=bands,
        not_promised=expected.not_promised,
    )


LARGER = "GPUs with more memory, or more of them in an engine (sample.tensor_parallel)"
"""What to take where a machine that samples does not hold its model."""


def _problem(recipe: Recipe, need: MemoryPlan | None, sampling: MemoryPlan | None) -> tuple[str, str]:
    """Why it does not fit, and the cheapest change that makes it fit; "" twice where it does."""
    if need and not need.fits:
        return need.problem, sizing.advice(recipe)
    if sampling and not sampling.fits:
        return f"the second group: {sampling.problem}", LARGER
    return "", ""


def _of_workers(recipe: Recipe, where: Where) -> list[str]:
    """Whose seconds the offers have, where rollout workers sample for the run."""
    if recipe.kind != "train":
        return []
    if recipe.config.fleet.gpus_per_node:
        return [fleet_words.own_nodes(recipe, fleet_cost.own_plan(recipe, *where))]
    if recipe.config.fleet.workers == "only":
        return [
            "rollout workers sample for this run: its hours and dollars above are those of engines on its own"
            " GPUs; `python3 launch.py plan RECIPE --fleet` has those with workers"
        ]
    return []


def _of_second_group(recipe: Recipe, need: MemoryPlan, rates: list[Hourly]) -> str:
    """The machines of `sample` in a line: their memory, and what both groups cost an hour."""
    assert recipe.sample is not None
    room = f"{need.peak.total / GIB:.1f} of {need.gpu_bytes / GIB:.1f} GiB a GPU"
    line = (
        f"second group: {sample_group.describe_machines(recipe.sample)}, {room}, "
        f"KV cache of {need.kv_cache_tokens:,} tokens"
    )
    if rates and rates[0].usd is not None:
        line += f"; both groups ${rates[0].usd:.2f} an hour on {rates[0].target} (--fleet: hours of both)"
    return line


def _starts(offers: list[cost.Offer]) -> list[str]:
    """How long a start takes, by the runs of this machine where it had some, and what a restart waits for."""
    if not offers:
        return []
    by_target = {offer.target: start_time.start_seconds(offer.target) for offer in offers}
    measured = []
    for name, (took, runs) in by_target.items():
        if runs:
            measured.append(f"{name} {took:.0f} s ({runs} runs launched from here)")
    assumed = start_time.Restart(0.0, 0.0).total()
    longer = f"longer where the model's download takes over {start_time.START_S:.0f} s"
    measured.append(f"{'else ' if measured else ''}{assumed:.0f} s assumed, {longer}")
    lines = [f"launch to first step: {', '.join(measured)}"]
    if spot := next((offer for offer in offers if offer.spot), None):
        lines.append(f"back after a preemption on {spot.target}: {spot.restart}")
    return lines


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
        hours_50=judged.median,
        hours_10=least,
        hours_90=most,
        usd=offer.usd,
        usd_50=None if rate is None else judged.median * rate,
        usd_10=None if rate is None else least * rate,
        usd_90=None if rate is None else most * rate,
        preemptions=offer.preemptions,
    )


def market_name(offer: cost.Offer) -> str:
    """How its machines are had, in a word."""
    if offer.usd_per_hour is None and not offer.spot:
        return "yours"
    return cost.market_of(offer.spot)


def likely_range(offer: PlannedOffer) -> str:
    """What a run there is likely to take and cost, and between what eight in ten such runs lie."""
    hours = f"{_hours(offer.hours_50)} h ({_hours(offer.hours_10)}-{_hours(offer.hours_90)})"
    if offer.usd_50 is None:
        return hours
    return f"{hours}, ${offer.usd_50:,.0f} ({offer.usd_10:,.0f}-{offer.usd_90:,.0f})"


def _hours(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def _price(taken: PlannedOffer | None, rate: HourlyPrice | None, named: str | None) -> str:
    """What the machines cost that are taken."""
    if taken:
        return f"{taken.target}, {taken.gpu} {taken.market}: {likely_range(taken)}"
    if rate:
        return f"${rate.usd:.2f} an hour on {rate.target}"
    return f"no price is known of {named or 'its machines'}"


def _verdict(recipe: Recipe, need: MemoryPlan | None, taken: PlannedOffer | None, price: str) -> str:
    """The verdict on what fits, or needs no GPU; that a run is likely to be ended before it is done."""
    if need is None and not recipe.cluster.gpus_per_node:
        return f"needs no GPU: {sample_group.machine_shape(recipe)}"
    if need is None:
        return f"holds no model: {price}"
    most = recipe.budget.max_hours
    if taken and taken.hours_50 > most:
        takes = f"{taken.target} likely takes {_hours(taken.hours_50)} h"
        return f"fits, but {takes}, and budget.max_hours ends it for good at {most:g} h"
    return f"{_room(need)}; {price}"


def _room(need: MemoryPlan) -> str:
    return f"fits with {(need.gpu_bytes - need.peak.total) / GIB:.1f} GiB to spare"


def _ended_early(recipe: Recipe, taken: PlannedOffer | None) -> list[str]:
    """That runs which take long are ended before they are done, if more than one in ten would be."""
    most = recipe.budget.max_hours
    if taken is None or taken.hours_90 <= most:
        return []
    enough = math.ceil(taken.hours_90)
    return [
        f"budget.max_hours ends it at {most:g} h; nine in ten such runs end within {enough}:"
        f" --set budget.max_hours={enough}"
    ]


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
        can = TARGETS[offer.target].network_gbit_s
        whose = "as given" if network_gbit_s else f"of {offer.target}"
        data += f"; {network_gbit_s or can.get(offer.gpu, can['']) or 100.0:g} Gb/s between nodes {whose}"
    lines = [data, ranges]
    if offer.vision:
        lines.append(
            f"{high:.2f}: what others published of such steps;"
            " no card has run this code since its host time fell"
        )
    slow = f"the slowest published step is {offer.published_end:g} times its plan"
    slow += "; --deadline and --budget count with it"
    took, runs = start_time.start_seconds(offer.target)
    seconds = took if runs else start_time.Restart(0.0, 0.0).total()
    known = f" ({runs} runs from here)" if runs else ""
    dates = sorted(row.read for row in prices.price_snapshot())
    read = f"prices of {dates[0]} to {dates[-1]} or SkyPilot's catalog"
    return [*lines, slow, f"{seconds:.0f} s to the first step{known}; {read}"]
