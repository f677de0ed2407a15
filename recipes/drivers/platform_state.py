"""What a run's record says once its platform was asked."""

from __future__ import annotations

import time
from dataclasses import replace

from recipes.plan import cost, prices
from recipes.platforms.answers import LAUNCH_FAILED, PlatformAnswer, PlatformAnswers
from recipes.platforms.targets import target_named
from recipes.presets import resolve
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError

OVERDUE_S = 300.0
"""How late a machine may be to go down before it counts as one that costs on."""
FORGOTTEN_S = 3600.0
"""A launch that the platform does not know this long after it was asked for was never taken: SkyPilot rents
its jobs controller first, and its server works on while the desk is away."""


def ask_platform(record: RunRecord, answers: PlatformAnswers | None = None) -> PlatformAnswer | None:
    """What a run's platform says of it; None where it does not answer, or has nothing to say."""
    return target_named(record.target).ask(record, answers or new_answers())


def new_answers() -> PlatformAnswers:
    """Answers of the platforms, none of which has been asked."""
    return PlatformAnswers(price=_usd_per_hour)


def _usd_per_hour(record: RunRecord, cloud: str, gpu: str, spot: bool) -> float:
    """Dollars per hour of all nodes of a run, from our price list; 0: not known."""
    try:
        recipe = resolve(record.recipe, record.overrides)
    except ConfigError:  # a recipe file that is gone
        return 0.0
    return cost.rented_usd(recipe, record.target, cloud, gpu, spot, prices.sky_catalogs())


def with_answer(record: RunRecord, answer: PlatformAnswer | None) -> RunRecord:
    """The record with what its platform says; no answer changes nothing."""
    if answer is None:
        return record
    if not answer.known:
        return _record_without_job(record, answer)
    ended_s = record.ended_s if record.confirmed else 0.0
    if ended_s and ended_s < time.time() - OVERDUE_S and not answer.ended_s:
        ended_s = 0.0  # it was to be gone by then, and costs on
    ended_s = ended_s or answer.ended_s
    return replace(
        record.seen(answer.usd_per_hour, answer.rented),
        confirmed=True,
        ended_s=ended_s,
        counted_usd=answer.usd if ended_s else record.counted_usd,
        state=answer.state,
        why=answer.why or (record.why if record.confirmed else ""),
    )


def _record_without_job(record: RunRecord, answer: PlatformAnswer) -> RunRecord:
    """The record of a run that its platform has not. A queue of jobs forgets what has ended; a cluster is
    gone."""
    if record.confirmed:
        return replace(record, ended_s=record.ended_s or answer.ended_s, state=answer.state or record.state)
    if record.ended_s or time.time() - record.started_s < FORGOTTEN_S:
        return record
    return launch_failed(record, answer.text)


def launch_failed(record: RunRecord, why: str) -> RunRecord:
    """The record of a launch that its platform never took."""
    return replace(record, ended_s=time.time(), state=LAUNCH_FAILED, why=why)
