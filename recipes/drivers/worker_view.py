"""What a desk sees of the machines that sample for a run: their launches, and dollars of their samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.presets import resolve
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError, load, run_folder
from trainer.config.run_folder import CONFIG, METRICS

STEPS = 20
"""Newest steps whose seconds and samples are taken."""
SAMPLED = "fleet/sampled_"
"""Start of the metrics that count completions by what sampled them."""


def gpu_of(record: RunRecord) -> str:
    """The GPU of a launch of workers, as its recipe calls it; "" on CPU, or where the recipe is gone."""
    try:
        recipe = resolve(record.recipe, record.overrides)
    except ConfigError:
        return ""
    return recipe.cluster.gpu if recipe.cluster.gpus_per_node else ""


def own_share(record: RunRecord) -> tuple[str, float]:
    """The GPU of a run's own nodes, and which share of them samples (`fleet.gpus_per_node`); ("", 0) where
    none does."""
    try:
        recipe = resolve(record.recipe, record.overrides)
    except ConfigError:  # the recipe is gone
        return "", 0.0
    gpus, own = recipe.cluster.gpus_per_node, recipe.config.fleet.gpus_per_node
    return (recipe.cluster.gpu, own / gpus) if own and gpus else ("", 0.0)


def usd_per_1000(
    rows: Sequence[dict[str, Any]], rates: Sequence[tuple[str, float]], samples: int, step_s: float
) -> dict[str, float]:
    """Dollars of 1,000 samples that were trained on, by GPU: what its machines cost in a step, idle time
    included, by its share of the step's samples.

    rows: lines of the run's metrics. rates: (GPU, dollars per hour) of every launch that lives, and of the
    run's own GPUs that sample.
    """
    usd: dict[str, float] = {}
    for gpu, rate in rates:
        if gpu:
            usd[gpu] = usd.get(gpu, 0.0) + rate * step_s / 3600
    return _of_samples(rows, usd, samples)


def usd_per_1000_of(run: str, folder: Path) -> dict[str, float]:
    """Dollars of 1,000 samples of a whole run, by GPU: all that its launches of workers have cost, and its
    own GPUs that sample, by their GPU's share of what was trained on, over all attempts. {} where that is
    not known. folder: the run's files."""
    usd: dict[str, float] = {}
    if run_record.is_known(run):
        record = run_record.load_record(run)
        gpu, share = own_share(record)
        if gpu:
            usd[gpu] = share * record.usd()
    for record in run_record.workers_of(run):
        gpu = gpu_of(record)
        if gpu:
            usd[gpu] = usd.get(gpu, 0.0) + record.usd()
    rows = run_folder.all_metrics(folder / METRICS)
    steps = [row["step"] for row in rows]
    try:
        samples = load(folder / CONFIG).samples_per_step * max(steps, default=0)
    except ConfigError:  # another version's
        return {}
    return _of_samples(rows, usd, samples)


def _of_samples(rows: Sequence[dict[str, Any]], usd: dict[str, float], samples: int) -> dict[str, float]:
    """Dollars of 1,000 samples. usd: dollars of all samples, by GPU. samples: of all
    workers."""
    sampled: dict[str, float] = {}
    for row in rows:
        for name, number in row.items():
            if name.startswith(SAMPLED):
                device = name.removeprefix(SAMPLED)
                sampled[device] = sampled.get(device, 0.0) + number
    total = sum(sampled.values())
    costs = {}
    for gpu, spent in usd.items():
        mine = sum(number for device, number in sampled.items() if _is(gpu, device))
        if mine and spent and samples:
            costs[gpu] = 1000 * spent / (samples * mine / total)
    return costs


def _is(gpu: str, device: str) -> bool:
    """Whether a driver's name of a card, `NVIDIA A100-SXM4-80GB`, is that of our GPU `A100-80GB`."""
    return set(gpu.lower().split("-")) <= set(device.lower().replace(" ", "-").split("-"))


def worker_lines(run: str) -> list[str]:
    """What the workers' samples cost, for `status`; [] where that is not known."""
    path = run_record.metrics_of(run_record.RUNS / run)
    rates = []
    record = run_record.load_record(run)
    gpu, share = own_share(record)
    if share and record.usd_per_hour_now():
        rates.append((gpu, share * record.usd_per_hour_now()))
    for record in run_record.workers_of(run):
        rate = record.usd_per_hour_now()
        if rate:
            rates.append((gpu_of(record), rate))
    if path is None or not rates:
        return []
    return _costs(path.parent, rates, path)


def _costs(folder: Path, rates: list[tuple[str, float]], metrics: Path) -> list[str]:
    try:
        samples = load(folder / CONFIG).samples_per_step
    except ConfigError:  # another version's
        return []
    rows = run_folder.newest_metrics(metrics)[-STEPS:]
    seconds = [row["time/step_s"] for row in rows if "time/step_s" in row]
    if not seconds:
        return []
    costs = usd_per_1000(rows, rates, samples, statistics.fmean(seconds))
    return [f"1,000 samples from {gpu}: ${usd:.3f}, idle time included" for gpu, usd in costs.items()]
