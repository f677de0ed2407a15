"""Sentences on rollout workers: whether they are a gain, what speaks against a plan, and what starts it."""

from __future__ import annotations

import shlex

from recipes.plan import cost, fleet_cost, prices, store_cost
from recipes.plan.fleet_cost import FleetRow, Fleets
from recipes.platforms.targets import target_named
from recipes.recipe.spec import Recipe, SampleGroup
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError

MODEL = (
    "A model (recipes/plan/fleet_cost.py states every assumption): no worker has run on a GPU. Preempted"
    " workers are not in it."
)


def fleet_remarks(recipe: Recipe, compared: Fleets) -> list[str]:
    """What speaks for other options, and what the bucket costs."""
    rows = compared.cheapest(compared.fleets)
    return [*_ahead(recipe, rows), *_egress(recipe, rows)]


def is_gain(recipe: Recipe, compared: Fleets) -> bool:
    """Whether the machines that the recipe names are a gain; True where it names none."""
    if recipe.sample is None:
        return True
    named = [row for row in compared.cheapest(compared.fleets) if row.gpus == _gpus(recipe)]
    return any(compared.beaten_by(row) is None for row in named)


def _gpus(recipe: Recipe) -> int:
    return recipe.cluster.nodes * recipe.cluster.gpus_per_node


def fleet_verdict(row: FleetRow, compared: Fleets) -> str:
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


def _ahead(recipe: Recipe, rows: list[FleetRow]) -> list[str]:
    """What sampling ahead brings without workers, and where it is not far enough with them."""
    lines = []
    if recipe.config.rollout.staleness or not rows:
        lines.append(
            "without workers rollout.staleness saves nothing: the same GPUs sample and learn in turns"
        )
    named = [row for row in rows if row.gpus == _gpus(recipe)] if recipe.sample else []
    lines += [line for row in named if (line := unit_line(recipe, row))]
    for row in rows if recipe.config.rollout.staleness else []:
        if row.worker and row.ahead < row.enough:
            most = fleet_cost.MOST_AHEAD
            remedy = f"--set rollout.staleness={row.enough} suffices"
            if row.enough > most:
                remedy = f"{row.enough} would, more than the {most} that are planned: take faster workers"
            lines.append(
                f"{row.trainer} with {row.worker.name}: rollout.staleness={row.ahead} lets the trainer wait"
                f" for the longest completion; {remedy}"
            )
    return lines


def unit_line(recipe: Recipe, row: FleetRow) -> str:
    """Which unit lets all of a row's workers sample, where the recipe's does not; else empty."""
    best = fleet_cost.better_unit(recipe, row)
    if best is None:
        return ""
    return (
        f"{row.trainer} with {row.count} workers: --set fleet.unit_prompts={best.unit_prompts} takes"
        f" {best.step_s:.1f} s and ${best.usd:.3f} a step, not {row.step_s:.1f} s and ${row.usd:.3f} in units"
        f" of {row.unit_prompts} prompts, of which a step has {row.units}"
    )


def _egress(recipe: Recipe, rows: list[FleetRow]) -> list[str]:
    """What leaves the store in a step, and a warning where it is much."""
    if not rows:
        return []
    row = max(rows, key=lambda row: row.count * row.patch_bytes)
    lines = [
        f"egress of {row.count} workers that read {row.patch_bytes / 1e6:,.0f} MB a step:"
        f" ${row.egress_usd:.3f}, counted out of {store_cost.scheme_of(recipe)}://;"
        " nothing within the bucket's own region"
    ]
    most = max(row.egress_usd / row.usd for row in rows)
    if most > store_cost.MUCH_EGRESS:
        lines.append(
            f"warning: egress is up to {most:.0%} of a step's dollars: keep the bucket on R2 (--bucket"
            " r2://NAME), or rent the workers in its region"
        )
    return lines


def cheapest_row(compared: Fleets, limits: tuple[float, float]) -> FleetRow | None:
    """The cheapest run that is expected to keep hours and dollars; with few steps ahead, where dollars are
    about the same."""
    kept = compared.within(*limits)
    return fleet_cost.fewest_ahead(kept, lambda row: row.run_usd) if kept else None


def nearest_rows(compared: Fleets) -> str:
    """The quickest and the cheapest run, where neither keeps the limits."""
    rows = (*compared.colocated, *compared.fleets)
    hours = min(row.hours for row in rows)
    usd = min(row.run_usd for row in rows)
    return f"the quickest takes {hours:.1f} h, the cheapest costs ${usd:,.0f}"


def shell_overrides(overrides: list[str]) -> str:
    """Overrides as a shell takes them, a space behind each."""
    return "".join(f"--set {shlex.quote(override)} " for override in overrides)


def row_options(recipe: Recipe, row: FleetRow) -> str:
    """What sets a recipe so."""
    sets = [f"cluster.gpu={row.offer.gpu}", "cluster.alternatives=[]"]
    if row.worker and row.worker.own:
        sets += ["fleet.workers=only", f"fleet.gpus_per_node={row.worker.own}"]
        sets.append(f"rollout.tensor_parallel={row.worker.gpus}")
    elif row.gpus != _gpus(recipe):
        nodes = recipe.cluster.nodes
        part = "cluster.nodes" if nodes > 1 else "cluster.gpus_per_node"
        sets.append(f"{part}={(nodes if nodes > 1 else recipe.cluster.gpus_per_node) // 2}")
    if row.worker:
        engine = recipe.config.rollout.tensor_parallel
        sets.append(f"rollout.staleness={row.ahead}")
        if row.ahead and recipe.config.algorithm.rollout_correction == "off":
            sets.append("algorithm.rollout_correction=truncate")  # what samples of older weights need
        if row.unit_prompts < recipe.config.rollout.prompts_per_step:
            sets.append(f"fleet.unit_prompts={row.unit_prompts}")
        same = SampleGroup(gpus_per_node=row.worker.gpus).engine_gpus(engine) == row.worker.gpus
        if not (row.worker.own or same):
            sets.append(f"sample.tensor_parallel={row.worker.gpus}")
    words = [f"--target {row.offer.target}", *(f"--set {shlex.quote(one)}" for one in sets)]
    if row.worker and not row.worker.own:
        market = "spot" if row.worker.spot else "on-demand"
        words.append(f"--fleet {row.count}x{row.worker.name}:{market}@{row.worker.target}")
    return " ".join(words)


def own_nodes(recipe: Recipe, row: FleetRow | None) -> str:
    """What a run is expected to take whose own nodes sample on some of their GPUs."""
    own = recipe.config.fleet.gpus_per_node
    text = (
        f"{own} of each node's {recipe.cluster.gpus_per_node} GPUs sample while the others learn; hours and"
        " dollars above are those of engines on the others."
    )
    if row is None:
        return f"{text} No time of both is planned: no price is known of machines that hold both"
    market = cost.market_of(row.offer.spot)
    text += (
        f" Planned on {row.offer.target}, {row.offer.gpu}, {market}: {row.step_s:.1f} s and ${row.usd:.3f} a"
        f" step, {row.hours:.1f} h and ${row.run_usd:,.0f}"
    )
    if line := unit_line(recipe, row):
        return f"{text}. {line}"
    if row.ahead < row.enough:
        text += f". --set rollout.staleness={row.enough} would let no completion be waited for"
    return text


def describe_both_groups(
    recipe: Recipe, run: RunRecord, workers: RunRecord
) -> tuple[list[str], FleetRow | None]:
    """What is about to be started: both groups of machines with their dollars, and whether they are a gain;
    and the plan of both, where prices are known."""
    lines = [
        f"run      {run.run_id}: {_own(recipe)} on {run.target}, {_per_hour(run)}",
        f"workers  {workers.run_id}: {_sampling(recipe)} on {workers.target}, {_per_hour(workers)}",
    ]
    if not (run.usd_per_hour and workers.usd_per_hour):
        return lines, None
    hourly = run.usd_per_hour + workers.usd_per_hour
    lines.append(f"both     ${hourly:.2f} per hour, workers until the run ends")
    if recipe.config.fleet.gpus_per_node:
        return [*lines, "no plan of both: the run's own nodes sample too (fleet.gpus_per_node)"], None
    targets = list(dict.fromkeys((run.target, workers.target)))
    try:
        compared = fleet_cost.compare_fleets(recipe, prices.sky_catalogs(), targets)
    except ConfigError as error:
        return [*lines, f"no plan of both: {error}"], None
    ahead = recipe.config.rollout.staleness
    mine = [row for row in compared.fleets if row.gpus == _gpus(recipe) and row.ahead == ahead]
    if not mine:
        return [*lines, "no plan of both: no price is known of machines that this recipe fits"], None
    row = min(mine, key=lambda row: row.usd)
    lines.append(
        f"planned  {row.hours:.1f} h and ${row.run_usd:,.0f}, {row.step_s:.1f} s and ${row.usd:.3f} a step,"
        f" with rollout.staleness={ahead}: {fleet_verdict(row, compared)}"
    )
    if line := unit_line(recipe, row):
        lines.append(f"units    {line}")
    elif row.ahead < row.enough:
        lines.append(
            f"         the trainer waits for the longest completion: {row.enough} steps ahead would be enough"
        )
    return lines, row


def _own(recipe: Recipe) -> str:
    cluster = recipe.cluster
    if not cluster.gpus_per_node:
        return "CPU ranks"
    return f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu}"


def _sampling(recipe: Recipe) -> str:
    assert recipe.sample is not None
    if not recipe.sample.gpus_per_node:
        return f"{recipe.sample.nodes} without a GPU"
    return f"{recipe.sample.nodes} x {recipe.sample.gpus_per_node} {recipe.sample.gpu}"


def _per_hour(record: RunRecord) -> str:
    if not target_named(record.target).cloud:
        return "machines of your own"
    return f"${record.usd_per_hour:.2f} per hour" if record.usd_per_hour else "no known price"
