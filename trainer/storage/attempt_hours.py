"""How long the attempts of one launch have trained together, from the record of attempts.

Each attempt is measured by the clock of its own head, from its start to its end, or to the last sign of life
of one that was killed: clocks of two machines are never compared.
"""

from __future__ import annotations

import math
from typing import Any

from trainer.storage.attempt_record import BEAT_S, AttemptRecord

SAVE_S = 300.0
"""Seconds before the limit at which a run is told to save; a tenth of a shorter limit."""
LEAST_S = 900.0
"""A restart with less time left than this is not made: the next start would take most of it."""


def spent_s(record: AttemptRecord, launch: str, before: int = 0) -> float:
    """Seconds of the attempts of the newest launch; 0 if that is another than `launch`. before: those of
    earlier numbers alone."""
    newest = record.newest()
    last = before - 1 if before else newest.attempt.epoch if newest else 0
    total = 0.0
    for epoch in range(last, 0, -1):
        begun = record.read(epoch)
        if not isinstance(begun, dict) or not isinstance(begun.get("launch"), str):
            continue  # a number that nobody kept, or an object that was damaged
        if begun["launch"] != launch:
            break
        since = _time(begun, "begun_unix_s")
        ended = _time(record.content(f"{epoch:08d}.end"), "unix_s")
        seen = max(since, _time(record.mark(epoch), "unix_s"))
        # One that was killed lived until its next mark at most.
        total += max(0.0, (ended or seen + BEAT_S) - since)
    return total


def hours_refusal(spent: float, max_hours: float) -> str:
    """Why no further attempt starts; "" where one may."""
    left = 3600 * max_hours - spent
    if not spent or left >= min(LEAST_S, 360 * max_hours):
        return ""
    return f"its attempts have taken {spent / 3600:.1f} h, and budget.max_hours is {max_hours:g}"


def save_s(max_hours: float) -> float:
    """Seconds before the limit at which the run is told to save."""
    return min(SAVE_S, 360 * max_hours)


def _time(value: dict[str, Any] | None, key: str) -> float:
    """A time of the record, unix seconds; 0 where there is none."""
    found = value.get(key) if isinstance(value, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return 0.0
    return float(found)
