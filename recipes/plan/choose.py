"""Which offer keeps a deadline and a budget: each run is simulated, since speed, lengths, starts and losses
vary from run to run.

The model of `cost.expected_seconds`, event by event: work in segments of one checkpoint interval (Young and
Daly's), preemptions as a Poisson process; a segment that is cut off is done again after the restart. What
else a run meets is drawn by `spread`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from recipes.plan import spread
from recipes.plan.cost import Offer
from recipes.plan.spread import AS_PLANNED, Luck

RUNS = 200
"""Simulated runs of one offer: a chance of 90% is then known to within 4 points (two standard errors)."""
SURE = 0.9
"""The share of runs that must keep the limits."""


@dataclass(frozen=True)
class Judged:
    """An offer, and how its simulated runs came out."""

    offer: Offer
    least: float
    """Hours within which the quickest tenth of the runs end."""
    hours: float
    """Hours within which SURE of the runs end."""
    usd: float | None
    """Dollars that SURE of the runs cost at most."""
    kept: float
    """Share of the runs that keep both limits."""


def simulate(offer: Offer, rng: random.Random, luck: Luck = AS_PLANNED) -> float:
    """Hours of one run. luck: by default all goes as planned, but for preemptions."""
    work = offer.work_s * luck.step
    start = offer.start_s * luck.start
    restart = offer.restart_s * luck.start
    clock = start * (1 + luck.failed_starts)
    done = 0.0
    down = 0.0
    interval = min(offer.interval_s, work) or work
    while done < work:
        segment = down + min(interval, work - done) + offer.stall_s
        life = math.inf if math.isinf(offer.between_s) else rng.expovariate(1 / offer.between_s)
        if life >= segment:
            clock = clock + segment
            done = done + interval
            down = 0.0
        else:
            clock = clock + life
            down = restart
    return clock / 3600


def judge(offer: Offer, deadline_h: float, budget_usd: float, seed: int = 0) -> Judged:
    """The offer against limits; either may be infinite. Machines of your own cost nothing."""
    rng = random.Random(seed)
    mortal = replace(offer, between_s=min(offer.between_s, spread.NODE_LIFE_S / offer.nodes))
    hours = []
    for _ in range(RUNS):
        luck = spread.draw(offer.step_bounds, offer.stretch, rng)
        hours.append(simulate(mortal, rng, luck))
    hours.sort()
    least = hours[math.ceil((1 - SURE) * RUNS) - 1]
    most = hours[math.ceil(SURE * RUNS) - 1]
    rate = offer.usd_per_hour or 0.0
    kept = 0
    for run_h in hours:
        if run_h <= deadline_h and run_h * rate <= budget_usd:
            kept += 1
    usd = None if offer.usd_per_hour is None else most * rate
    return Judged(offer, least, most, usd, kept / len(hours))


def choose(offers: list[Offer], deadline_h: float, budget_usd: float) -> tuple[Judged | None, list[Judged]]:
    """The cheapest offer (by expected dollars) that keeps both limits in SURE of its runs, and all as
    judged."""
    judged = [judge(offer, deadline_h, budget_usd) for offer in offers]
    for one in judged:
        if one.kept >= SURE:
            return one, judged
    return None, judged


def given_up(chosen: Judged, judged: list[Judged]) -> list[str]:
    """What other offers had that the chosen one has not: more speed, or fewer dollars."""
    said = []
    priced = [j for j in judged if j.offer.usd is not None]
    fast = min(priced, key=lambda j: j.offer.hours, default=chosen)
    cheap = min(priced, key=lambda j: j.offer.usd or 0.0, default=chosen)
    if fast.offer.hours < chosen.offer.hours:
        more = (fast.offer.usd or 0.0) - (chosen.offer.usd or 0.0)
        said.append(
            f"{chosen.offer.hours - fast.offer.hours:.1f} hours: {name(fast)} is faster, for ${more:,.0f}"
            " more"
        )
    if (cheap.offer.usd or 0.0) < (chosen.offer.usd or 0.0):
        less = (chosen.offer.usd or 0.0) - (cheap.offer.usd or 0.0)
        said.append(
            f"${less:,.0f}: {name(cheap)} is cheaper, and keeps the limits in {cheap.kept:.0%} of its runs"
        )
    return said


def name(judged: Judged) -> str:
    """Target, GPU and market of an offer."""
    return f"{judged.offer.target} {judged.offer.gpu} {'spot' if judged.offer.spot else 'on demand'}"


def hours_of(text: str) -> float:
    """Hours of `90m`, `24h` or `3d`. Raises ValueError."""
    return float(text[:-1]) * {"m": 1 / 60, "h": 1.0, "d": 24.0}[text[-1:]]
