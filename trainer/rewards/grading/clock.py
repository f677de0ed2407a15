"""Times of day: `14:30`, `2:30 PM`, `2 p.m.`"""

from __future__ import annotations

import re
from functools import lru_cache

from trainer.rewards.grading.notation import common_notation

Time = tuple[int, int, int, str]
"""(hour, minute, second, "a" | "p" | "")."""

_CLOCK = re.compile(
    r"(?:at )?([0-9]{1,2})(?::([0-5][0-9])(?::([0-5][0-9]))?)?\s*(?:(a|p)\.?\s?m\.?|h(?:ours)?|o'clock)?",
    re.ASCII | re.IGNORECASE,
)


@lru_cache(maxsize=8192)
def time_of_day(content: str) -> Time | None:
    """The time of day that a text names; None if it names none."""
    match = _CLOCK.fullmatch(common_notation(content)) if len(content) <= 40 else None
    if match is None or int(match[1]) > 24 or (match[2] is None and match[4] is None):
        return None
    hour = int(match[1])
    half = (match[4] or "").lower()
    if half and not 1 <= hour <= 12:
        return None
    return hour, int(match[2] or 0), int(match[3] or 0), half


def same_time(reference: Time, answer: Time) -> bool:
    """Whether two times of day are the same.

    A marker in the reference must be met (3:45 PM is 15:45). An answer's own marker must fit an hour that
    only one half of the day has; beside another hour it does no harm.
    """
    if reference[1:3] != answer[1:3]:
        return False
    if reference[3]:
        return _hour24(reference) == _hour24(answer) and (answer[3] != "" or answer[0] > 12)
    return reference[0] == answer[0] or (
        answer[3] != "" and _hour24(answer) == reference[0] and not 0 < reference[0] < 13
    )


def _hour24(time: Time) -> int:
    hour, _, _, half = time
    if not half:
        return hour
    return hour % 12 + 12 if half == "p" else hour % 12
