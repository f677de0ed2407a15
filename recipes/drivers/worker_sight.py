"""What a desk sees of the machines that sample for a run: their launches, and dollars of their samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes import run_record
from recipes.presets import resolve
from recipes.run_record import RunRecord
from trainer.config import ConfigError, load, run_folder
from trainer.config.run_folder import CONFIG

STEPS = 20
"""Newest steps whose seconds are taken."""


def gpu_of(record: RunRecord) -> str:
    """The GPU of a launch of workers, as its recipe calls it; "" on CPU, or where the recipe is gone."""
    try:
        recipe = resolve(record.recipe, record.overrides)
    except ConfigError:
        return ""
    return recipe.cluster.gpu if recipe.cluster.gpus_per_node else ""


def usd_per_1000(
    workers: Sequence[dict[str, Any]], rates: Sequence[tuple[str, float]], samples: int, step_s: float
) -> dict[str, float]:
    """Dollars of 1,000 samples that were trained on, by GPU: what its machines cost in a step, idle time
    included, by its share of the step's samples.

    workers: the run's roster. rates: (GPU, dollars per hour) of every launch that lives.
    """
    total = sum(worker["completions"] for worker in workers)
    found = {}
    for gpu in dict.fromkeys(gpu for gpu, _ in rates if gpu):
        mine = [worker["completions"] for worker in workers if _is(gpu, worker["device"])]
        usd = sum(rate for one, rate in rates if one == gpu) * step_s / 3600
        if sum(mine) and usd:
            found[gpu] = 1000 * usd / (samples * sum(mine) / total)
    return found


def _is(gpu: str, device: str) -> bool:
    """Whether a driver's name of a card, `NVIDIA A100-SXM4-80GB`, is that of our GPU `A100-80GB`."""
    return set(gpu.lower().split("-")) <= set(device.lower().replace(" ", "-").split("-"))


def lines(run: str) -> list[str]:
    """What the workers' samples cost, for `status`; [] where that is not known."""
    path = run_record.metrics_of(run_record.RUNS / run)
    rates = []
    for record in run_record.workers_of(run):
        if rate := record.usd_per_hour_now():
            rates.append((gpu_of(record), rate))
    if path is None or not rates:
        return []
    return _costs(path.parent, rates, path)


def _costs(folder: Path, rates: list[tuple[str, float]], metrics: Path) -> list[str]:
    try:
        samples = load(folder / CONFIG).samples_per_step
    except ConfigError:  # another version's
        return []
    seconds = [row["time/step_s"] for row in run_folder.newest_lines(metrics) if "time/step_s" in row]
    if not seconds:
        return []
    step_s = statistics.fmean(seconds[-STEPS:])
    costs = usd_per_1000(run_folder.read_roster(folder), rates, samples, step_s)
    return [f"1,000 samples from {gpu}: ${usd:.3f}, idle time included" for gpu, usd in costs.items()]
