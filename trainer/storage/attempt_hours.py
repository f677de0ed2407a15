"""How long the attempts of one launch have trained together, from the record of attempts.

Each attempt is measured by the dates of the store that holds its objects, from its start to its end, or to
the last sign of life of one that was killed. A machine's own clock may be a day off when it starts.
"""

from __future__ import annotations

from trainer.storage.attempt_record import BEAT_S, AttemptRecord, StartRecord

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
    for begun in record.starts(last):
        if begun.launch != launch:
            break
        total += _duration_s(record, begun)
    return total


def _duration_s(record: AttemptRecord, begun: StartRecord) -> float:
    """Seconds of one attempt. One that was killed lived until its next mark at most."""
    name = f"{begun.epoch:08d}"
    since = record.storage.written_s(f"{name}.json") or begun.begun_unix_s
    ended = record.storage.written_s(f"{name}.end.json")
    seen = record.storage.written_s(f"{name}.beat.json") or since
    return max(0.0, (ended or max(since, seen) + BEAT_S) - since)


def hours_refusal(spent: float, max_hours: float) -> str:
    """Why no further attempt starts; "" where one may."""
    left = 3600 * max_hours - spent
    if not spent or left >= min(LEAST_S, 360 * max_hours):
        return ""
    return f"its attempts have taken {spent / 3600:.1f} h, and budget.max_hours is {max_hours:g}"


def save_s(max_hours: float) -> float:
    """Seconds before the limit at which the run is told to save."""
    return min(SAVE_S, 360 * max_hours)
