"""72B on four spot nodes: the hours that the plan expects against a discrete-event run of what the trainer
does.

Its formula (`recipes/plan/cost.py`) sees a renewal process: a segment of interval + stall is redone until it
ends without a preemption. The simulation plays the trainer step by step: it saves at step ends only, one
checkpoint at a time, a save counts once it is committed to the bucket (upload seconds after its snapshot), a
preemption throws the run back to the last committed step, restarts can be preempted too, and the run ends
when its last checkpoint is committed.

Prices, sizes and the times of steps, starts and restarts are the plan's; they are a model, not a measurement.
Writes JSON and an SVG:

    python -m benchmarks.spot_simulation
"""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipes.plan import cost
from recipes.presets import get
from recipes.presets.models_and_data import with_parts
from recipes.recipe.spec import Recipe
from trainer.hardware.save_interval import save_interval_s

HERE = Path(__file__).parent
RECIPE, TARGET = "grpo-qwen2.5-vl-72b-mathv60k", "skypilot-gcp"
RATES = (0.0, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0)
"""Preemptions of the whole job per day."""
RUNS = 400


@dataclass(frozen=True)
class Job:
    """What the simulation knows of a run; seconds."""

    steps: int
    step_s: float
    stall_s: float
    upload_s: float
    start_s: float
    restart_s: float

    def interval_steps(self, between_s: float) -> int:
        """Steps between saves, as `Checkpoints.due` chooses them."""
        wanted = save_interval_s(self.stall_s, between_s) if math.isfinite(between_s) else 3600.0
        return max(1, round(max(wanted, self.upload_s) / self.step_s))


@dataclass
class Outcome:
    """One simulated run."""

    hours: float
    preemptions: int
    lost_steps: int
    """Computed and thrown away, all preemptions together; the step under way counts."""


def simulate(job: Job, between_s: float, rng: random.Random) -> Outcome:
    """Plays one run to its end."""
    every = job.interval_steps(between_s)
    draw = (lambda: rng.expovariate(1 / between_s)) if math.isfinite(between_s) else (lambda: math.inf)
    clock, end_of_life = job.start_s, draw()
    done = committed = saved = 0
    pending: tuple[int, float] | None = None
    preemptions = lost = 0
    restarting_until = clock
    while True:
        # What comes next on this node: the end of the restart, of a step, or (after the last one) of the last
        # commit.
        if clock < restarting_until:
            event = restarting_until
        elif done < job.steps:
            event = clock + job.step_s
        elif pending is not None:
            event = pending[1]
        else:
            event = clock
        if end_of_life <= event and committed < job.steps:
            clock = end_of_life
            if pending is not None and pending[1] <= clock:
                committed = pending[0]
            began = clock > restarting_until and done < job.steps
            lost += done - committed + began
            preemptions += 1
            done = saved = committed
            pending = None
            restarting_until = clock + job.restart_s
            end_of_life = clock + draw()
            continue
        stepping = clock >= restarting_until and done < job.steps
        clock = max(clock, event)
        if pending is not None and pending[1] <= clock:
            committed, pending = pending[0], None
        done += stepping
        due = done - saved >= every or done == job.steps
        if pending is None and due and done > saved:
            clock += job.stall_s
            saved, pending = done, (done, clock + job.upload_s)
        if committed == job.steps:
            return Outcome(clock / 3600, preemptions, lost)


def whole_pass() -> Recipe:
    """The 72B recipe over all of MathV60K once: long enough that preemptions are certain."""
    recipe = get(RECIPE)
    return replace(recipe, config=with_parts(recipe.config, data={"max_samples": 0, "episodes": 1}))


def planned(recipe: Recipe, between_s: float) -> dict[tuple[str, bool], cost.Offer]:
    """(GPU, spot) -> the plan, with so many seconds between preemptions on spot."""
    config = with_parts(recipe.config, checkpoint={"mean_time_between_preemptions_s": between_s})
    offers = cost.offers(replace(recipe, config=config), targets=[TARGET])
    return {(offer.gpu, offer.spot): offer for offer in offers}


def job_of(offer: cost.Offer) -> Job:
    """What the plan says of one run. It counts the upload that a preemption cuts off as part of the restart;
    the simulation loses it by itself."""
    return Job(
        steps=offer.steps,
        step_s=offer.step.total - offer.step.checkpoint,
        stall_s=offer.stall_s,
        upload_s=offer.restart_s - offer.waited_s,
        start_s=offer.start_s,
        restart_s=offer.waited_s,
    )


def measure() -> dict[str, Any]:
    """Simulates every GPU type and rate."""
    recipe, rng = whole_pass(), random.Random(0)
    between = {rate: 86400 / rate if rate else math.inf for rate in RATES}
    plans = {rate: planned(recipe, between[rate]) for rate in RATES}
    gpus: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {
        "recipe": RECIPE,
        "data": "one pass over MathV60K",
        "target": TARGET,
        "runs": RUNS,
        "gpus": gpus,
    }
    for gpu in ("A100-80GB", "H100"):
        job = job_of(plans[0.0][gpu, True])
        hourly = {spot: plans[0.0][gpu, spot].usd_per_hour or 0.0 for spot in (True, False)}
        on_demand_h = simulate(job, math.inf, rng).hours
        rows: list[dict[str, float]] = []
        for rate in RATES:
            runs = [simulate(job, between[rate], rng) for _ in range(RUNS if rate else 1)]
            hours = statistics.fmean(run.hours for run in runs)
            formula = plans[rate][gpu, True].hours
            count = sum(run.preemptions for run in runs)
            rows.append(
                {
                    "preemptions_per_day": rate,
                    "interval_steps": job.interval_steps(between[rate]),
                    "hours_simulated": round(hours, 2),
                    "hours_p90": round(sorted(run.hours for run in runs)[int(0.9 * (len(runs) - 1))], 2),
                    "hours_formula": round(formula, 2),
                    "formula_over_simulated": round(formula / hours, 3),
                    "usd_spot": round(hours * hourly[True]),
                    "spot_over_on_demand_usd": round(hours * hourly[True] / (on_demand_h * hourly[False]), 3),
                    "steps_lost_per_preemption": (
                        round(sum(r.lost_steps for r in runs) / count, 2) if count else 0.0
                    ),
                }
            )
        gpus[gpu] = {
            "job": {key: round(value, 1) for key, value in vars(job).items()},
            "usd_per_hour": {"spot": hourly[True], "on_demand": hourly[False]},
            "on_demand": {"hours": round(on_demand_h, 2), "usd": round(on_demand_h * hourly[False])},
            "rows": rows,
        }
    return result


# --- plot ---------------------------------------------------------------------------------------------------

WIDTH = 360
HEIGHT = 230
LEFT = 56
TOP = 34
GAP = 70
COLORS = {"A100-80GB": "#0072b2", "H100": "#d55e00"}


def svg(result: dict[str, Any]) -> str:
    """Two panels over preemptions per day: hours (line: formula, dots: simulation) and dollars (dashes: on
    demand)."""
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * (WIDTH + LEFT) + GAP - 20}'
            f' {HEIGHT + TOP + 62}" font-family="sans-serif" font-size="12">'
        ),
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    panels = (("hours", "hours_formula", "hours_simulated", "hours"), ("dollars", "", "usd_spot", "usd"))
    for number, (title, line, dots, flat) in enumerate(panels):
        left = LEFT + number * (WIDTH + GAP)
        values = [row[dots] for gpu in result["gpus"].values() for row in gpu["rows"]]
        top = _round_up(max([*values, *(gpu["on_demand"][flat] for gpu in result["gpus"].values())]))

        def x(rate, left=left):
            return left + WIDTH * rate / RATES[-1]

        def y(value, top=top):
            return TOP + HEIGHT * (1 - value / top)

        parts.append(
            f'<text x="{left}" y="{TOP - 12}" font-weight="bold">{title}, one pass of 72B on 4 x 8</text>'
        )
        for tick in range(5):
            value = top * tick / 4
            parts.append(f'<path d="M{left} {y(value):.1f}h{WIDTH}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,.0f}</text>')
        for rate in (0, 12, 24, 36, 48):
            parts.append(
                f'<text x="{x(rate):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{rate}</text>'
            )
        parts.append(
            f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">preemptions per'
            " day</text>"
        )
        for name, gpu in result["gpus"].items():
            color, rows = COLORS[name], gpu["rows"]
            at = gpu["on_demand"][flat]
            parts.append(f'<path d="M{left} {y(at):.1f}h{WIDTH}" stroke="{color}" stroke-dasharray="5 4"/>')
            key = line or dots
            path = "L".join(f"{x(row['preemptions_per_day']):.1f} {y(row[key]):.1f}" for row in rows)
            parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
            for row in rows:
                parts.append(
                    f'<circle cx="{x(row["preemptions_per_day"]):.1f}" cy="{y(row[dots]):.1f}" r="3"'
                    f' fill="{color}"/>'
                )
    legend = TOP + HEIGHT + 54
    for number, name in enumerate(result["gpus"]):
        parts.append(f'<circle cx="{LEFT + number * 110}" cy="{legend - 4}" r="4" fill="{COLORS[name]}"/>')
        parts.append(f'<text x="{LEFT + 8 + number * 110}" y="{legend}">{name}</text>')
    note = "dots: simulated; line: formula (hours); dashes: on demand, never preempted"
    parts.append(f'<text x="{LEFT + 250}" y="{legend}" fill="#555">{note}</text></svg>')
    return "\n".join(parts) + "\n"


def _round_up(value: float) -> float:
    unit = 10 ** math.floor(math.log10(value))
    return next(m * unit for m in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10) if m * unit >= value)


if __name__ == "__main__":
    found = measure()
    (HERE / "spot_simulation.json").write_text(json.dumps(found, indent=1) + "\n")
    (HERE.parent / "docs" / "spot_simulation.svg").write_text(svg(found))
    for gpu_name, figures in found["gpus"].items():
        print(gpu_name, figures["job"], figures["on_demand"])
        for row in figures["rows"]:
            print("  ", row)
