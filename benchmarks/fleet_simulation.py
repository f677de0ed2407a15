"""A 7B run whose samples come from rollout workers, with workers and trainer preempted: hours, dollars, and
the share of units that were sampled again.

It plays the schedule of `recipes/plan/fleet_cost.py` and adds machines that are taken away after a random
time (Poisson; `trace_simulation.py` has a public trace). A worker that goes takes its unit with it; the
unit is free again after `fleet.lost_s`. A trainer that goes resumes from its last checkpoint: steps whose
samples were whole are in the rollout log and are only learned again, the units of other steps are sampled
again. All machines are paid for to the end, also while they are away. Times and prices are the plan's: a
model, not a measurement.

    python -m benchmarks.fleet_simulation
"""

from __future__ import annotations

import heapq
import json
import math
import random
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recipes.plan import cost, fleet_cost, memory, passes, start_time
from recipes.plan.fleet_cost import POLL_S, FleetRow
from recipes.presets import get
from recipes.recipe.spec import Recipe

HERE = Path(__file__).parent
RECIPE = "grpo-qwen2.5-vl-7b-mathv60k"
GPU, WORKER = "A100-80GB", "A100-80GB"
AHEAD = 3
COUNTS = (2, 3)
LIVES_H = (math.inf, 24.0, 4.0, 1.0, 0.5)
"""Mean hours that a worker lives."""
TRAINER_LIVES_H = (math.inf, 4.0)
RUNS = 20


@dataclass(frozen=True)
class FleetWork:
    """What is played; seconds."""

    steps: int
    units: tuple[float, ...]
    ahead: int
    update_s: float
    switch_s: float
    workers: int
    save_steps: int
    """Steps between checkpoints."""
    worker_back_s: float
    trainer_back_s: float
    lost_s: float = 30.0


@dataclass(order=True)
class LivingWorker:
    """A worker, by when it is free."""

    free: float
    version: int = field(compare=False)
    dies: float = field(compare=False)
    number: int = field(compare=False, default=0)


@dataclass(frozen=True)
class Played:
    """One run."""

    seconds: float
    again: float
    """Units that were sampled again, as a share of those that the run needed."""
    workers_lost: int
    trainers_lost: int


class Play:
    """One run, step by step."""

    def __init__(self, work: FleetWork, life_s: float, trainer_life_s: float, rng: random.Random) -> None:
        self.work, self.rng = work, rng
        self.life_s, self.trainer_life_s = life_s, trainer_life_s
        self.machines = [LivingWorker(0.0, 0, self._life(life_s)) for _ in range(work.workers)]
        self.again = 0
        self.workers_lost = 0
        self.trainer_dies = self._life(trainer_life_s)
        self.away: list[tuple[float, float]] = []
        """When the trainer went, and when it was back."""

    def _life(self, mean_s: float) -> float:
        return self.rng.expovariate(1 / mean_s) if math.isfinite(mean_s) else math.inf

    def run(self) -> Played:
        """Plays it to its end."""
        work = self.work
        published = [0.0]
        trained = 0.0
        saved = 0
        for step in range(1, work.steps + 1):
            version = max(0, step - 1 - work.ahead)
            asked = published[version] + (POLL_S if version else 0.0)
            sampled = self._whole(version, asked)
            begin = max(trained, sampled)
            while self.trainer_dies < begin + work.update_s:
                back = self.trainer_dies + work.trainer_back_s
                self.away.append((self.trainer_dies, back))
                self.trainer_dies = back + self._life(self.trainer_life_s)
                if sampled > self.away[-1][0]:
                    self.again += len(work.units)
                    sampled = self._step(version, back)
                begin = max(back + (step - 1 - saved) * work.update_s, sampled)
            trained = begin + work.update_s
            published.append(trained)
            saved = step if step % work.save_steps == 0 else saved
        needed = work.steps * len(work.units)
        return Played(trained, self.again / needed, self.workers_lost, len(self.away))

    def _whole(self, version: int, asked: float) -> float:
        """When a step is sampled that is asked for at a time, and anew where the trainer went before it was
        whole."""
        sampled = self._step(version, asked)
        for gone, back in self.away:
            if asked < gone < sampled:
                self.again += len(self.work.units)
                asked = back
                sampled = self._step(version, asked)
        return sampled

    def _step(self, version: int, asked: float) -> float:
        """When all units of a step are sampled."""
        sampled = asked
        for seconds in self.work.units:
            sampled = max(sampled, self._unit(version, asked, seconds))
        return sampled

    def _unit(self, version: int, ready: float, seconds: float) -> float:
        """When a unit is sampled, each time by the worker that is free first."""
        while True:
            machine = heapq.heappop(self.machines)
            start = max(machine.free, ready)
            if machine.dies <= start:
                self._replace(machine)
                continue
            switch = self.work.switch_s if machine.version != version else 0.0
            end = start + switch + seconds
            if machine.dies >= end:
                heapq.heappush(self.machines, replace(machine, free=end, version=version))
                return end
            self.again += 1
            ready = max(ready, machine.dies + self.work.lost_s)
            self._replace(machine)

    def _replace(self, machine: LivingWorker) -> None:
        self.workers_lost += 1
        back = machine.dies + self.work.worker_back_s
        heapq.heappush(self.machines, LivingWorker(back, -1, back + self._life(self.life_s)))


def work_of(recipe: Recipe, row: FleetRow) -> FleetWork:
    """A row of the plan as it is played."""
    worker, offer = row.worker, row.offer
    assert worker is not None
    shape = worker.need.shape
    update = fleet_cost.update_seconds(recipe, shape, offer.step)
    units = fleet_cost.unit_seconds(worker, shape, passes.of_step(recipe, shape), row.unit_prompts)
    download = 2.0 * shape.parameters / cost.DOWNLOAD_BYTES_S
    return FleetWork(
        steps=offer.steps,
        units=tuple(units),
        ahead=row.ahead,
        update_s=update,
        switch_s=fleet_cost.switch_seconds(recipe, shape, worker),
        workers=row.count,
        save_steps=max(1, round(offer.interval_s / row.step_s)),
        worker_back_s=start_time.Restart(download, 0.0).total(),
        trainer_back_s=offer.restart_s,
    )


def colocated_hours(offer: cost.Offer, between_s: float) -> float:
    """Expected hours of the run without workers, where its machines live so long."""
    work = cost.expected_seconds(offer.work_s, offer.interval_s, offer.stall_s, offer.restart_s, between_s)
    return (offer.start_s + work) / 3600


def measure() -> dict[str, Any]:
    """Both lives varied, for each number of workers, beside the run without."""
    recipe = get(RECIPE)
    offer = next(one for one in cost.offers(recipe) if one.gpu == GPU and one.usd is not None)
    worker = next(one for one in fleet_cost.worker_kinds(recipe, None, None) if one.gpu == WORKER)
    need = memory.plan_memory(recipe, GPU)
    assert need is not None
    whole = recipe.config.rollout.prompts_per_step
    rates = offer.usd_per_hour or 0.0
    rows = []
    for row in fleet_cost.fleets_of(recipe, recipe, offer, worker):
        if (row.ahead, row.unit_prompts) != (AHEAD, whole) or row.count not in COUNTS:
            continue
        work = work_of(recipe, row)
        for trainer_h in TRAINER_LIVES_H:
            for life_h in LIVES_H:
                lives = life_h * 3600, trainer_h * 3600
                runs = [Play(work, *lives, random.Random(seed)).run() for seed in range(RUNS)]
                hours = statistics.mean(one.seconds for one in runs) / 3600 + offer.start_s / 3600
                alone = colocated_hours(offer, trainer_h * 3600)
                rows.append(
                    {
                        "workers": row.count,
                        "worker_life_h": life_h if math.isfinite(life_h) else None,
                        "trainer_life_h": trainer_h if math.isfinite(trainer_h) else None,
                        "hours": round(hours, 2),
                        "usd": round(hours * row.usd_per_hour + offer.steps * row.egress_usd, 1),
                        "sampled_again": round(statistics.mean(one.again for one in runs), 4),
                        "hours_without_workers": round(alone, 2),
                        "usd_without_workers": round(alone * rates, 1),
                    }
                )
    return {
        "what": f"{RECIPE}: {offer.gpu} trainer, {worker.gpu} workers, {AHEAD} steps ahead, {RUNS} runs each",
        "prices": {"trainer": round(rates, 2), "worker": round(worker.usd_per_hour, 2)},
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """The rows as docs/planned.md has them."""
    lines = [
        "| a worker lives | the trainer lives | 2 workers: h, $, again | 3 workers | without workers: h, $ |",
        "|---|---|---|---|---|",
    ]
    rows = {(row["trainer_life_h"], row["worker_life_h"], row["workers"]): row for row in result["rows"]}
    for trainer, life in dict.fromkeys(key[:2] for key in rows):
        found = [rows[trainer, life, count] for count in COUNTS]
        cells = [f"{one['hours']:.1f}, {one['usd']:.0f}, {one['sampled_again']:.1%}" for one in found]
        alone = f"{found[0]['hours_without_workers']:.1f}, {found[0]['usd_without_workers']:.0f}"
        lives = [f"{hours:g} h" if hours else "to the end" for hours in (life, trainer)]
        lines.append(f"| {' | '.join([*lives, *cells, alone])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = measure()
    (HERE / "fleet_simulation.json").write_text(json.dumps(found, indent=1) + "\n")
    print(found["what"], found["prices"])
    print(table(found))
