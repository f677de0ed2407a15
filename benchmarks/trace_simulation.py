"""The run of `fleet_simulation.py`, with its workers on the spot machines of a public trace.

`spot_trace.json` says how many of four machines there were in one zone of AWS, every five minutes for a day
and a half, half of the time none: worse than what a person would choose, who has several zones. A fleet takes
as many of them as it has spot workers, and pays for a machine while that is there; further workers stay to
the end, at the same price. The run is begun at every half
hour of the trace, which is repeated where a run is longer. The trainer's machines are another matter: they
stay, or are taken away after a random time. Times and prices are the plan's: a model, not a measurement.

    python -m benchmarks.trace_simulation
"""

from __future__ import annotations

import heapq
import json
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.fleet_simulation import (
    AHEAD,
    GPU,
    HERE,
    RECIPE,
    TRAINER_LIVES_H,
    WORKER,
    FleetWork,
    LivingWorker,
    Play,
    colocated_hours,
    work_of,
)
from recipes.plan import cost, fleet_cost
from recipes.presets import get

TRACE = HERE / "spot_trace.json"
FLEETS = ((2, 0), (4, 0), (2, 1), (2, 2))
"""Spot workers, and workers that stay."""
EVERY = 6
"""Ticks of the trace between two beginnings."""


class SpotTrace:
    """Machines that there were at each tick."""

    def __init__(self, runs: list[tuple[int, int]], gap_s: float) -> None:
        """runs: (machines, ticks) in order."""
        self.gap_s = gap_s
        self.levels: list[int] = []
        for level, ticks in runs:
            self.levels += [level] * ticks

    @property
    def share(self) -> float:
        """Mean share of four machines that there were."""
        return statistics.fmean(self.levels) / max(self.levels)

    def spans(self, number: int, first: int) -> Iterator[tuple[float, float]]:
        """Seconds from tick `first` on between which machine `number` is there, one after the other, without
        end."""
        tick = first
        while True:
            while self.levels[tick % len(self.levels)] <= number:
                tick += 1
            begin = tick
            while self.levels[tick % len(self.levels)] > number:
                tick += 1
            yield (begin - first) * self.gap_s, (tick - first) * self.gap_s


class TracedPlay(Play):
    """One run that begins at a tick of the trace."""

    def __init__(
        self,
        work: FleetWork,
        trace: SpotTrace,
        first: int,
        trainer_life_s: float,
        rng: random.Random,
        steady: int = 0,
    ) -> None:
        """steady: workers of all that stay to the end."""
        super().__init__(work, math.inf, trainer_life_s, rng)
        self._spans: list[Iterator[tuple[float, float]]] = [
            trace.spans(number, first) for number in range(work.workers - steady)
        ]
        self._spans += [iter([(0.0, math.inf)]) for _ in range(steady)]
        self.rented: list[tuple[float, float]] = []
        """When a machine came, and when it went."""
        self.machines = [self._next(number) for number in range(work.workers)]
        heapq.heapify(self.machines)

    def _next(self, number: int) -> LivingWorker:
        begin, end = next(self._spans[number])
        self.rented.append((begin, end))
        return LivingWorker(begin + (self.work.worker_back_s if begin else 0.0), -1, end, number)

    def _replace(self, machine: LivingWorker) -> None:
        self.workers_lost += 1
        heapq.heappush(self.machines, self._next(machine.number))

    def rented_hours(self, seconds: float, start_s: float = 0.0) -> float:
        """Hours of machines that a run of so many seconds pays for. start_s: the trainer's start before them,
        for which the workers that are there at its end are paid too."""
        paid_s = 0.0
        for begin, end in self.rented:
            paid_s += max(0.0, min(end, seconds) - begin)
            if begin == 0.0:
                paid_s += start_s
        return paid_s / 3600


def measure() -> dict[str, Any]:
    """Every number of workers, with a trainer that stays and with one that does not."""
    told = json.loads(TRACE.read_text())
    trace = SpotTrace(told["runs"], told["gap_seconds"])
    recipe = get(RECIPE)
    offer = next(one for one in cost.offers(recipe) if one.gpu == GPU and one.usd is not None)
    worker = next(one for one in fleet_cost.worker_kinds(recipe, None, None) if one.gpu == WORKER)
    whole = recipe.config.rollout.prompts_per_step
    planned = fleet_cost.fleets_of(recipe, recipe, offer, worker)
    row = next(one for one in planned if (one.ahead, one.unit_prompts, one.count) == (AHEAD, whole, 2))
    rows = []
    for spot, steady in FLEETS:
        count = spot + steady
        work = replace(work_of(recipe, row), workers=count)
        egress_usd = offer.steps * row.egress_usd / row.count * count
        for trainer_h in TRAINER_LIVES_H:
            hours: list[float] = []
            dollars: list[float] = []
            again: list[float] = []
            lost: list[int] = []
            for first in range(0, len(trace.levels), EVERY):
                play = TracedPlay(work, trace, first, trainer_h * 3600, random.Random(first), steady)
                played = play.run()
                hours.append((played.seconds + offer.start_s) / 3600)
                machines = play.rented_hours(played.seconds, offer.start_s) * worker.usd_per_hour
                dollars.append(hours[-1] * (offer.usd_per_hour or 0.0) + machines + egress_usd)
                again.append(played.again)
                lost.append(played.workers_lost)
            alone = colocated_hours(offer, trainer_h * 3600)
            rows.append(
                {
                    "spot_workers": spot,
                    "workers_that_stay": steady,
                    "trainer_life_h": trainer_h if math.isfinite(trainer_h) else None,
                    "hours": round(statistics.fmean(hours), 2),
                    "hours_most": round(max(hours), 2),
                    "usd": round(statistics.fmean(dollars), 1),
                    "sampled_again": round(statistics.fmean(again), 4),
                    "workers_lost": round(statistics.fmean(lost), 1),
                    "hours_without_workers": round(alone, 2),
                    "usd_without_workers": round(alone * (offer.usd_per_hour or 0.0), 1),
                }
            )
    return {
        "what": f"{RECIPE}: {offer.gpu} trainer, {worker.gpu} workers, {AHEAD} steps ahead",
        "trace": told["source"],
        "share_of_machines": round(trace.share, 3),
        "begun": len(range(0, len(trace.levels), EVERY)),
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """The rows as docs/planned.md has them."""
    lines = [
        "| spot workers | that stay | the trainer lives | h | most h | $ | again | lost |"
        " without workers: h, $ |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        life = f"{row['trainer_life_h']:g} h" if row["trainer_life_h"] else "to the end"
        alone = f"{row['hours_without_workers']:.1f}, {row['usd_without_workers']:.0f}"
        who = f"{row['spot_workers']} | {row['workers_that_stay']} | {life}"
        cost_of = f"{row['hours']:.1f} | {row['hours_most']:.1f} | {row['usd']:.0f}"
        lines.append(
            f"| {who} | {cost_of} | {row['sampled_again']:.1%} | {row['workers_lost']:.0f} | {alone} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    found = measure()
    (HERE / "trace_simulation.json").write_text(json.dumps(found, indent=1) + "\n")
    print(found["what"], f"{found['share_of_machines']:.0%} of the machines there")
    print(table(found))
