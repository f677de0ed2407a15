"""`plan --fleet` on one screen: whether rollout workers are a gain, the cheapest runs with and without them,
and the command that starts the cheapest."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.text import Text

from recipes.plan import fleet_cost, prices
from recipes.plan.fleet_cost import FleetRow, Fleets
from recipes.platforms.targets import target_named
from recipes.recipe import sample_group
from recipes.recipe.spec import Recipe, SampleGroup
from recipes.records.run_record import RunRecord
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


def is_gain(recipe: Recipe, compared: Fleets) -> bool:
    """Whether workers are one: those of `sample`, where the recipe names them."""
    return recipe.sample is None or any(compared.beaten_by(row) is None for row in compared.cheapest())


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
    recipe: Recipe,
    compared: Fleets,
    limits: tuple[float, float],
    console: Console,
    command: str,
    whole: bool = False,
) -> None:
    """The whole screen. limits: hours and dollars, infinite where none were given. command: `RECIPE`, and the
    overrides that it was planned with. whole: with every row, and what speaks for and against each."""
    gain = is_gain(recipe, compared)
    taken, best = compared.taken(*limits), compared.cheapest()
    console.print(Text(_verdict(compared, taken, gain), style="green" if gain else "red"))
    steps = (compared.colocated or compared.fleets)[0].offer.steps
    head = "cheapest step first; on demand where spot is not said"
    console.print(Text(f"{recipe.name}: {steps:,} steps, {head}\n"))
    alone, fleets, remarks = (None, None, None) if whole else MOST
    shown = (*compared.colocated[:alone], *best[:fleets])
    rows = []
    for row in shown:
        figures = (str(row.ahead), f"{row.step_s:.1f}", f"{row.hours:.1f}", f"{row.run_usd:,.0f}")
        unit = (str(row.enough), str(row.unit_prompts)) if row.worker else ("", "")
        verdict = row_verdict(row, compared) if row.worker else ""
        more = (*unit, f"{row.egress_usd:.3f}", verdict) if whole else ()
        rows.append((_learners(row), _workers(row), *figures, *more))
    columns = ("that learn", "that sample", "ahead", "s/step", "hours", "$")
    if whole:
        columns = (*columns, "enough", "a unit", "egress $", "")
    marked = shown.index(taken) if taken in shown else -1
    show_table(console, columns, rows, words=2, marked=marked, last_is_words=whole)
    if taken:
        price = f"{taken.hours:.1f} h, ${taken.run_usd:,.0f}"
        console.print(Text(f"\ncheapest: {_learners(taken)}; workers: {_workers(taken)}; {price}"))
        start = f"python3 launch.py up {command} {row_options(recipe, taken)}"
        console.print(Text(start), soft_wrap=True)
    console.print()
    show_lines(console, (*_remarks(recipe, compared, best)[:remarks], MODEL), whole=whole)
    console.print("more: --all; to choose: --deadline 24h, --budget 100")


def _learners(row: FleetRow) -> str:
    return f"{row.trainer} {row.offer.target}{' spot' if row.offer.spot else ''}"


def _workers(row: FleetRow) -> str:
    if (worker := row.worker) is None:
        return "none"
    return f"{row.count} x {worker.name}, {worker.target}{' spot' if worker.spot else ''}"


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
