"""`plan --fleet` on one screen: whether rollout workers are a gain, the cheapest runs with and without them,
and the command that starts the cheapest."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from recipes.plan import cost, fleet_cost, prices
from recipes.plan.fleet_cost import FleetRow, Fleets
from recipes.platforms.targets import target_named
from recipes.recipe import sample_group
from recipes.recipe.spec import Recipe, SampleGroup
from recipes.records.run_record import RunRecord
from recipes.screens.plan_facts import SCHEMA
from recipes.screens.tables import show_lines, show_table
from trainer.config import ConfigError

MOST = (3, 8, 3)
"""Rows without workers, rows with them, and remarks, of which no more are shown."""
MUCH_EGRESS = 0.2
"""Share of a step's dollars from which on egress is warned of."""
MODEL = (
    "A model (recipes/plan/fleet_cost.py states every assumption): no worker has run on a GPU. Preempted"
    " workers are not in it."
)


@dataclass(frozen=True)
class PlannedFleet:
    """One way to run the recipe: without workers, or with `count` of them."""

    trainer: str
    """GPUs that learn."""
    target: str
    """Where those are."""
    market: str
    """spot or on demand, as that of the worker."""
    count: int
    """Workers."""
    worker: str | None
    """GPUs of one; null without workers."""
    worker_target: str | None
    """Where it is."""
    worker_market: str | None
    """Spot or on demand."""
    ahead: int
    """Steps that sampling is ahead of learning."""
    enough: int
    """The fewest steps ahead at which nothing waits for the longest completion."""
    unit_prompts: int
    """Prompts that a worker samples at once."""
    step_s: float
    """Seconds of a whole step."""
    hours: float
    """The run's."""
    usd: float
    """The run's, egress included."""
    egress_usd: float
    """A step's."""
    options: str
    """What `up RECIPE` needs to start it."""
    verdict: str
    """Whether its workers are a gain, beside the cheapest run without; empty of that."""


@dataclass(frozen=True, kw_only=True)
class FleetFacts:
    """What `plan --fleet --json` prints."""

    schema: int = SCHEMA
    """As of `plan --json`."""
    recipe: str
    """Its name."""
    steps: int
    """Steps of the run."""
    verdict: str
    """In one line."""
    gain: bool
    """Whether workers are one: those of `sample`, where the recipe names them."""
    alone: list[PlannedFleet]
    """Without workers, the cheapest step first."""
    fleets: list[PlannedFleet]
    """With workers: the cheapest of each pair of machines, the cheapest step first."""
    taken: PlannedFleet | None
    """The cheapest that keeps the limits."""
    remarks: list[str]
    """Warnings, in sentences."""


def fleet_facts(recipe: Recipe, compared: Fleets, limits: tuple[float, float]) -> FleetFacts:
    """Puts what was compared into words. limits: hours and dollars, infinite where none were given."""
    best = compared.cheapest()
    gain = recipe.sample is None or any(compared.beaten_by(row) is None for row in best)
    taken = compared.taken(*limits)
    rows = [*compared.colocated, *compared.fleets]
    return FleetFacts(
        recipe=recipe.name,
        steps=rows[0].offer.steps,
        verdict=_verdict(compared, taken, gain),
        gain=gain,
        alone=[planned_fleet(recipe, row, compared) for row in compared.colocated],
        fleets=[planned_fleet(recipe, row, compared) for row in best],
        taken=planned_fleet(recipe, taken, compared) if taken else None,
        remarks=_remarks(recipe, compared, best),
    )


def planned_fleet(recipe: Recipe, row: FleetRow, compared: Fleets) -> PlannedFleet:
    """A row as facts."""
    worker = row.worker
    return PlannedFleet(
        trainer=row.trainer,
        target=row.offer.target,
        market=cost.market_of(row.offer.spot),
        count=row.count,
        worker=worker.name if worker else None,
        worker_target=worker.target if worker else None,
        worker_market=cost.market_of(worker.spot) if worker else None,
        ahead=row.ahead,
        enough=row.enough,
        unit_prompts=row.unit_prompts,
        step_s=row.step_s,
        hours=row.hours,
        usd=row.run_usd,
        egress_usd=row.egress_usd,
        options=row_options(recipe, row),
        verdict=row_verdict(row, compared) if worker else "",
    )


def _verdict(compared: Fleets, taken: FleetRow | None, gain: bool) -> str:
    """Whether workers are a gain, in a line."""
    rows = [*compared.colocated, *compared.fleets]
    if not gain:
        return "workers are a loss: without them the run is as fast and costs as little"
    if taken is None:
        hours, usd = min(row.hours for row in rows), min(row.run_usd for row in rows)
        nearest = f"the quickest takes {hours:.1f} h, the cheapest costs ${usd:,.0f}"
        return f"nothing is expected to keep the limits: {nearest}"
    run = f"{taken.hours:.1f} h and ${taken.run_usd:,.0f} on {taken.offer.target}"
    if taken.worker is None:
        return f"cheapest without workers: {run}, {taken.trainer}"
    if not compared.colocated:
        return f"only with workers: {run}, for no machine holds engines beside the learner"
    alone = min(compared.colocated, key=lambda row: row.run_usd)
    return f"workers are a gain: {run}, without them {alone.hours:.1f} h and ${alone.run_usd:,.0f}"


def row_verdict(row: FleetRow, compared: Fleets) -> str:
    """Whether workers are a gain, beside the cheapest run without."""
    if better := compared.beaten_by(row):
        return f"loss: {better.trainer} alone is better"
    if not compared.colocated:
        return "gain: without workers no engine fits"
    rival = compared.colocated[0]
    times = f"{rival.step_s / row.step_s:.2f}x speed, {row.usd / rival.usd:.2f}x dollars"
    if row.usd < rival.usd:
        return f"gain: {times}" if row.step_s < rival.step_s else f"cheaper, slower: {times}"
    return f"faster, dearer: {times}" if row.step_s < rival.step_s else f"slower, dearer: {times}"


def _remarks(recipe: Recipe, compared: Fleets, rows: list[FleetRow]) -> list[str]:
    """What speaks for other options of the machines that the recipe names, and much egress."""
    lines = [_advice(row, compared) for row in rows] if recipe.sample else []
    share = max((row.egress_usd / row.usd for row in rows), default=0.0)
    if share > MUCH_EGRESS:
        lines.append(
            f"warning: egress out of {fleet_cost.store_scheme(recipe)}:// is up to {share:.0%} of a step's"
            " dollars: keep the bucket on R2 (--bucket r2://NAME), or rent the workers in its region"
        )
    return list(filter(None, lines))


def _advice(row: FleetRow, compared: Fleets) -> str:
    """The unit that lets all of a row's workers sample, else the steps ahead at which nothing waits; "" where
    the row has both."""
    best = compared.better_unit(row)
    start = f"{row.trainer} with {row.count} workers"
    if best:
        return (
            f"{start}: --set fleet.unit_prompts={best.unit_prompts} takes {best.step_s:.1f} s and"
            f" ${best.usd:.3f} a step, not {row.step_s:.1f} s and ${row.usd:.3f} in units of"
            f" {row.unit_prompts} prompts"
        )
    if row.ahead >= row.enough:
        return ""
    return f"{start}: the trainer waits for the longest completion; {row.enough} steps ahead would be enough"


def row_options(recipe: Recipe, row: FleetRow) -> str:
    """What sets a recipe so."""
    sets = [f"cluster.gpu={row.offer.gpu}", "cluster.alternatives=[]"]
    words = []
    if worker := row.worker:
        engine = recipe.config.rollout.tensor_parallel
        sets.append(f"rollout.staleness={row.ahead}")
        if row.ahead and recipe.config.algorithm.rollout_correction == "off":
            sets.append("algorithm.rollout_correction=truncate")  # what samples of older weights need
        if row.unit_prompts < recipe.config.rollout.prompts_per_step:
            sets.append(f"fleet.unit_prompts={row.unit_prompts}")
        if SampleGroup(gpus_per_node=worker.gpus).engine_gpus(engine) != worker.gpus:
            sets.append(f"sample.tensor_parallel={worker.gpus}")
        market = "spot" if worker.spot else "on-demand"
        words.append(f"--fleet {row.count}x{worker.name}:{market}@{worker.target}")
    options = [f"--set {shlex.quote(assignment)}" for assignment in sets]
    return " ".join([f"--target {row.offer.target}", *options, *words])


def show_fleets(
    facts: FleetFacts, console: Console, name: str, overrides: list[str], whole: bool = False
) -> None:
    """The whole screen. name: the recipe's, or its file. overrides: those that it was planned with. whole:
    with every row, and what speaks for and against each."""
    console.print(Text(facts.verdict, style="green" if facts.gain else "red"))
    head = "cheapest step first; on demand where spot is not said"
    console.print(Text(f"{facts.recipe}: {facts.steps:,} steps, {head}\n"))
    alone, fleets, remarks = (None, None, None) if whole else MOST
    shown = (*facts.alone[:alone], *facts.fleets[:fleets])
    rows = []
    for fleet in shown:
        figures = (str(fleet.ahead), f"{fleet.step_s:.1f}", f"{fleet.hours:.1f}", f"{fleet.usd:,.0f}")
        unit = (str(fleet.enough), str(fleet.unit_prompts)) if fleet.worker else ("", "")
        more = (*unit, f"{fleet.egress_usd:.3f}", fleet.verdict) if whole else ()
        rows.append((_learners(fleet), _workers(fleet), *figures, *more))
    columns = ("that learn", "that sample", "ahead", "s/step", "hours", "$")
    if whole:
        columns = (*columns, "enough", "a unit", "egress $", "")
    marked = shown.index(facts.taken) if facts.taken in shown else -1
    show_table(console, columns, rows, words=2, marked=marked, last_is_words=whole)
    if taken := facts.taken:
        price = f"{taken.hours:.1f} h, ${taken.usd:,.0f}"
        console.print(Text(f"\ncheapest: {_learners(taken)}; workers: {_workers(taken)}; {price}"))
        sets = "".join(f"--set {shlex.quote(override)} " for override in overrides)
        console.print(Text(f"python3 launch.py up {name} {sets}{taken.options}"), soft_wrap=True)
    console.print()
    show_lines(console, (*facts.remarks[:remarks], MODEL), whole=whole)
    console.print("more: --all, --json; to choose: --deadline 24h, --budget 100")


def _learners(fleet: PlannedFleet) -> str:
    return f"{fleet.trainer} {_place(fleet.target, fleet.market)}"


def _workers(fleet: PlannedFleet) -> str:
    if fleet.worker is None:
        return "none"
    return f"{fleet.count} x {fleet.worker}, {_place(fleet.worker_target, fleet.worker_market)}"


def _place(target: str | None, market: str | None) -> str:
    return f"{target} spot" if market == "spot" else f"{target}"


def describe_both_groups(
    recipe: Recipe, run: RunRecord, workers: RunRecord
) -> tuple[list[str], FleetRow | None]:
    """What is about to be started: both groups of machines with their dollars, and whether they are a gain;
    and the plan of both, where prices are known."""
    assert recipe.sample is not None
    own = sample_group.describe_machines(recipe.cluster) if recipe.cluster.gpus_per_node else "CPU ranks"
    theirs = f"{recipe.sample.nodes} without a GPU"
    if recipe.sample.gpus_per_node:
        theirs = sample_group.describe_machines(recipe.sample)
    lines = [
        f"run      {run.run_id}: {own} on {run.target}, {_per_hour(run)}",
        f"workers  {workers.run_id}: {theirs} on {workers.target}, {_per_hour(workers)}",
    ]
    if not (run.usd_per_hour and workers.usd_per_hour):
        return lines, None
    hourly = run.usd_per_hour + workers.usd_per_hour
    lines.append(f"both     ${hourly:.2f} per hour, workers until the run ends")
    try:
        compared = fleet_cost.compare_fleets(recipe, prices.sky_catalogs(), [run.target, workers.target])
    except ConfigError as error:
        return [*lines, f"no plan of both: {error}"], None
    ahead = recipe.config.rollout.staleness
    planned = [row for row in compared.fleets if row.ahead == ahead]
    if not planned:
        return [*lines, "no plan of both: no price is known of machines that this recipe fits"], None
    row = min(planned, key=lambda row: row.usd)
    lines.append(
        f"planned  {row.hours:.1f} h and ${row.run_usd:,.0f}, {row.step_s:.1f} s and ${row.usd:.3f} a step,"
        f" with rollout.staleness={ahead}: {row_verdict(row, compared)}"
    )
    return [*lines, *filter(None, [_advice(row, compared)])], row


def _per_hour(record: RunRecord) -> str:
    if not target_named(record.target).cloud:
        return "machines of your own"
    return f"${record.usd_per_hour:.2f} per hour" if record.usd_per_hour else "no known price"
