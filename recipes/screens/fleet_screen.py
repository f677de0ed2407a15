"""`plan --fleet` on one screen: whether rollout workers are a gain, the cheapest runs with and without them,
and the command that starts the cheapest."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from recipes.plan import cost
from recipes.plan.fleet_cost import FleetRow, Fleets
from recipes.recipe.spec import Recipe
from recipes.screens import fleet_words
from recipes.screens.plan_facts import SCHEMA
from recipes.screens.tables import WIDTH, show_lines, show_table

ALONE = 3
FLEETS = 8
REMARKS = 3
"""Most rows that are shown, without workers and with them, and most remarks."""
INDENT = 6 * " "


@dataclass(frozen=True)
class PlannedFleet:
    """One way to run the recipe: without workers, or with `count` of them."""

    trainer: str
    """GPUs that learn; "A of B x GPU" where the others of the same nodes sample."""
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
    gain = fleet_words.is_gain(recipe, compared)
    taken = fleet_words.cheapest_row(compared, limits)
    rows = [*compared.colocated, *compared.fleets]
    return FleetFacts(
        recipe=recipe.name,
        steps=rows[0].offer.steps,
        verdict=_verdict(compared, taken, gain),
        gain=gain,
        alone=[planned_fleet(recipe, row, compared) for row in compared.colocated],
        fleets=[planned_fleet(recipe, row, compared) for row in compared.cheapest(compared.fleets)],
        taken=planned_fleet(recipe, taken, compared) if taken else None,
        remarks=fleet_words.fleet_remarks(recipe, compared),
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
        options=fleet_words.row_options(recipe, row),
        verdict=fleet_words.fleet_verdict(row, compared) if worker else "",
    )


def _verdict(compared: Fleets, taken: FleetRow | None, gain: bool) -> str:
    """Whether workers are a gain, in a line."""
    if not gain:
        return "workers are a loss: without them the run is as fast and costs as little"
    if taken is None:
        return f"nothing is expected to keep the limits: {fleet_words.nearest_rows(compared)}"
    run = f"{taken.hours:.1f} h and ${taken.run_usd:,.0f} on {taken.offer.target}"
    if taken.worker is None:
        return f"cheapest without workers: {run}, {taken.trainer}"
    if not compared.colocated:
        return f"only with workers: {run}, for no machine holds engines beside the learner"
    alone = min(compared.colocated, key=lambda row: row.run_usd)
    return f"workers are a gain: {run}, without them {alone.hours:.1f} h and ${alone.run_usd:,.0f}"


def show_fleets(
    facts: FleetFacts, console: Console, name: str, overrides: list[str], whole: bool = False
) -> None:
    """The whole screen. name: the recipe's, or its file. overrides: those that it was planned with. whole:
    with every row, and what speaks for and against each."""
    console.print(Text(facts.verdict, style="green" if facts.gain else "red"))
    head = "cheapest step first; on demand where spot is not said"
    console.print(Text(f"{facts.recipe}: {facts.steps:,} steps, {head}\n"))
    alone, fleets = (None, None) if whole else (ALONE, FLEETS)
    shown = (*facts.alone[:alone], *facts.fleets[:fleets])
    rows = []
    for fleet in shown:
        figures = (str(fleet.ahead), f"{fleet.step_s:.1f}", f"{fleet.hours:.1f}", f"{fleet.usd:,.0f}")
        more = ()
        if whole:
            unit = (str(fleet.enough), str(fleet.unit_prompts)) if fleet.worker else ("", "")
            more = (*unit, f"{fleet.egress_usd:.3f}", fleet.verdict)
        rows.append((_learners(fleet), _workers(fleet), *figures, *more))
    columns = ("that learn", "that sample", "ahead", "s/step", "hours", "$")
    if whole:
        columns = (*columns, "enough", "a unit", "egress $", "")
    marked = shown.index(facts.taken) if facts.taken in shown else -1
    show_table(console, columns, rows, words=2, marked=marked, last_is_words=whole)
    if facts.taken:
        taken = facts.taken
        price = f"{taken.hours:.1f} h, ${taken.usd:,.0f}"
        console.print(Text(f"\ncheapest: {_learners(taken)}; workers: {_workers(taken)}; {price}"))
        sets = fleet_words.shell_overrides(overrides)
        words = f"python3 launch.py up {name} {sets}{taken.options}"
        console.print(Text(words if whole else continued_command(words)), soft_wrap=True)
    console.print()
    show_lines(console, (*facts.remarks[: None if whole else REMARKS], fleet_words.MODEL), whole=whole)
    console.print("more: --all, --json; to choose: --deadline 24h, --budget 100")


def _learners(fleet: PlannedFleet) -> str:
    return f"{fleet.trainer} {_place(fleet.target, fleet.market)}"


def _workers(fleet: PlannedFleet) -> str:
    if fleet.worker is None:
        return "none"
    where = "same nodes" if " of " in fleet.trainer else _place(fleet.worker_target, fleet.worker_market)
    return f"{fleet.count} x {fleet.worker}, {where}"


def _place(target: str | None, market: str | None) -> str:
    return f"{target} spot" if market == "spot" else f"{target}"


def continued_command(command: str) -> str:
    """A command over several lines of the screen's width, as a shell takes it."""
    lines = textwrap.wrap(
        command,
        WIDTH - 4,
        initial_indent=INDENT[2:],
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return " \\\n".join(lines)
