"""`launch.py scaling`: the same short run on several numbers of nodes, and what came of it in one table.

Weak scaling: rows per step grow with the nodes, so that every GPU has as much to do. The first call starts
the runs; a later one starts what is missing and shows what is there.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.commands import launch_requests
from recipes.commands.launch_requests import LaunchRequest
from recipes.plan import cost, memory, step_seconds
from recipes.presets import resolve
from recipes.recipe.spec import Recipe
from recipes.records import run_record
from trainer.config import ConfigError, run_folder
from trainer.config.run_folder import METRICS

WARM_UP = 3
"""First steps, which load, compile and gather ahead in an order that is not known yet; not counted."""


@dataclass(frozen=True)
class MeasuredRun:
    """One run, and what the plan says of it."""

    nodes: int
    ranks: int
    step_s: float
    """Median."""
    tokens_per_s: float
    """All GPUs, median."""
    planned_s: float
    """Seconds per step by the plan; 0: none."""


def parse_sizes(text: str) -> list[int]:
    """`1,2,4`, ascending. Raises ConfigError."""
    try:
        found = sorted({int(word) for word in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise ConfigError(f"--nodes {text!r}: write it as 1,2,4,8")
    return found


def size_overrides(recipe: Recipe, nodes: int, steps: int) -> list[str]:
    """What makes a run of so many nodes of the recipe. Raises ConfigError where its rows do not divide."""
    config, had = recipe.config, recipe.cluster.nodes
    grown = {"sft.batch_size" if config.method == "sft" else "rollout.prompts_per_step": config.rows_per_step}
    if config.method == "grpo" and config.algorithm.samples_per_update:
        grown["algorithm.samples_per_update"] = config.algorithm.samples_per_update
    for key, rows in grown.items():
        if rows * nodes % had:
            raise ConfigError(
                f"{key} {rows} of {had} nodes cannot be cut to {nodes}: set it to a multiple of {had}"
            )
    return [
        f"cluster.nodes={nodes}",
        f"run.max_steps={steps}",
        "evaluation.every_steps=0",
        "checkpoint.export_hf=never",
        f"checkpoint.every_steps={steps}",
        *(f"{key}={rows * nodes // had}" for key, rows in grown.items()),
    ]


def run_scaling(request: LaunchRequest, nodes_text: str, steps: int) -> int:
    """Starts what is missing, and shows what has been measured. 2 while a run is not there yet."""
    given, options = list(request.overrides), request.options
    recipe = resolve(request.recipe, given)
    if steps <= WARM_UP:
        raise ConfigError(f"--steps {steps}: the first {WARM_UP} are not counted; give more")
    found, missing = [], []
    stem = options.run_id or f"scaling-{run_record.as_run_id(recipe.name)}"
    for nodes in parse_sizes(nodes_text):
        run_id = f"{stem}-{nodes}n"
        changed = [*given, *size_overrides(recipe, nodes, steps)]
        if not run_record.is_known(run_id):
            own = replace(options, run_id=run_id, detach=True)
            if code := launch_requests.start_run(replace(request, overrides=tuple(changed), options=own)):
                return code
        if lines := steps_of(run_id):
            found.append(measured_run(resolve(request.recipe, changed), request.target, lines))
        else:
            missing.append(run_id)
    print(scaling_table(found))
    for run_id in missing if not options.dry_run else []:
        print(
            f"{run_id} has no steps here yet: wait for it, or `python3 launch.py pull {run_id}`, then run"
            " this again"
        )
    return 2 if missing and not options.dry_run else 0


def steps_of(run_id: str) -> list[dict[str, float]]:
    """Metrics of the counted steps of a run, where its files are here."""
    for folder in (run_record.RUNS / run_id, run_record.RUNS / run_id / run_record.PULLED):
        path = Path(folder) / METRICS
        if path.is_file():
            lines = run_folder.read_lines(path)
            if counted := [line for line in lines if line["step"] > WARM_UP and "time/step_s" in line]:
                return counted
    return []


def measured_run(recipe: Recipe, target: str | None, lines: Sequence[dict[str, float]]) -> MeasuredRun:
    """A run's medians, beside its plan."""
    placement, need = recipe.config.placement, memory.plan_memory(recipe)
    gpus = placement.nodes * recipe.config.processes_per_node
    network, planned = cost.network_of(recipe, target), 0.0
    if need is not None:
        planned = step_seconds.step_time(recipe, recipe.cluster.gpu, network, need).total
    tokens = statistics.median(line["perf/tokens_per_s_per_gpu"] for line in lines) * gpus
    step_s = statistics.median(line["time/step_s"] for line in lines)
    return MeasuredRun(recipe.cluster.nodes, placement.world_size, step_s, tokens, planned)


def scaling_table(runs: Sequence[MeasuredRun]) -> str:
    """Text, a line per run; speed-up and efficiency are over the smallest."""
    if not runs:
        return "no run has been measured yet"
    lines = [
        f"{'nodes':>6}{'ranks':>7}{'s/step':>10}{'planned':>10}{'tokens/s':>12}{'speed-up':>10}{'efficiency':>12}"
    ]
    first = runs[0]
    for run in runs:
        speed = run.tokens_per_s / first.tokens_per_s
        planned = f"{run.planned_s:.2f}" if run.planned_s else "-"
        share = speed * first.nodes / run.nodes
        row = f"{run.nodes:>6}{run.ranks:>7}{run.step_s:>10.2f}{planned:>10}{run.tokens_per_s:>12,.0f}"
        lines.append(f"{row}{speed:>9.2f}x{share:>12.0%}")
    return "\n".join(lines)
