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
from recipes.plan.cost import Offer, market_of

RUNS = 200
"""Simulated runs of one offer: a chance of 90% is then known to within 4 points (two standard errors)."""
MANY = 5.0
"""Segments that are so many times longer than machines live are not drawn: they are cut off a hundred
times."""
SURE = 0.9
"""The share of runs that must keep the limits."""


@dataclass(frozen=True)
class JudgedOffer:
    """An offer, and how its simulated runs came out."""

    offer: Offer
    least: float
    """Hours within which the quickest tenth of the runs end."""
    median: float
    """Hours within which half of the runs end: what is likely."""
    hours: float
    """Hours within which SURE of the runs end."""
    usd: float | None
    """Dollars that SURE of the runs cost at most."""
    kept: float
    """Share of the runs that keep both limits."""

    @property
    def name(self) -> str:
        """Target, GPU and market."""
        return f"{self.offer.target} {self.offer.gpu} {market_of(self.offer.spot)}"


def simulate_run(
    offer: Offer, rng: random.Random, step: float = 1.0, start: float = 1.0, failed: int = 0
) -> float:
    """Hours of one run. step, start: how many times longer these take than planned. failed: starts."""
    work = offer.work_s * step
    restart = offer.restart_s * start
    interval = min(offer.interval_s, work) or work
    segments = math.ceil(work / interval - 1e-9)
    clock = offer.start_s * start * (1 + failed) + work + segments * offer.stall_s
    if not math.isinf(offer.between_s):
        clock += _lost(segments, interval + offer.stall_s, restart, offer.between_s, rng)
    return clock / 3600


def _lost(segments: int, segment: float, restart: float, between: float, rng: random.Random) -> float:
    """Seconds that losses cost beside the work: drawn loss by loss, since a run has thousands of segments and
    few losses. A segment that is cut off is done again after the restart, and may be cut off again."""
    lost = 0.0
    longer = segment + restart
    again = -math.expm1(-longer / between)
    at = rng.expovariate(1 / between)  # seconds of first tries until the next loss
    while at < segments * segment:
        lost += at % segment + restart
        if longer > MANY * between:  # so many losses that their mean tells enough
            lost += math.expm1(longer / between) * between - longer
        else:
            while rng.random() < again:
                lost += -between * math.log1p(-rng.random() * again)
        # What is left of the segment's first try has been done by now: the next loss is in a later one.
        at = (at // segment + 1) * segment + rng.expovariate(1 / between)
    return lost


def judge_offer(
    offer: Offer, deadline_h: float, budget_usd: float, seed: int = 0, published: bool = False
) -> JudgedOffer:
    """The offer against limits; either may be infinite. Machines of your own cost nothing. published: every
    step takes as long as the slowest that others have published, instead of a draw from the plan's range."""
    end = offer.published_end
    bounds = (end, end) if published else offer.step_bounds
    rng = random.Random(seed)
    mortal = replace(offer, between_s=min(offer.between_s, spread.NODE_LIFE_S / offer.nodes))
    hours = []
    for _ in range(RUNS):
        hours.append(simulate_run(mortal, rng, *spread.draw_luck(bounds, offer.stretch, rng)))
    hours.sort()
    least = hours[math.ceil((1 - SURE) * RUNS) - 1]
    median = hours[RUNS // 2 - 1]
    most = hours[math.ceil(SURE * RUNS) - 1]
    rate = offer.usd_per_hour or 0.0
    kept = 0
    for run_h in hours:
        if run_h <= deadline_h and run_h * rate <= budget_usd:
            kept += 1
    usd = None if offer.usd_per_hour is None else most * rate
    return JudgedOffer(offer, least, median, most, usd, kept / len(hours))


def choose_offer(
    offers: list[Offer], deadline_h: float, budget_usd: float
) -> tuple[JudgedOffer | None, list[JudgedOffer]]:
    """The cheapest offer (by expected dollars) that keeps both limits in SURE of its runs at the published
    end, and all as judged: no run on a GPU stands behind the plan's own range."""
    judged = [judge_offer(offer, deadline_h, budget_usd, published=True) for offer in offers]
    for candidate in judged:
        if candidate.kept >= SURE:
            return candidate, judged
    return None, judged


def parse_hours(text: str) -> float:
    """Hours of `90m`, `24h` or `3d`. Raises ValueError."""
    return float(text[:-1]) * {"m": 1 / 60, "h": 1.0, "d": 24.0}[text[-1:]]
