"""Times of day (`14:30`, `2:30 PM`) and dates with the month in words or the year first (`June 5, 2020`,
`2020-06-05`). `5/6/2020` names two days, so it equals itself alone."""

from __future__ import annotations

import re
from functools import lru_cache

from trainer.rewards.grading.notation import common_notation

MAX_CHARS = 60
_NAMES = "january february march april may june july august september october november december"
_MONTHS = {name[:length]: n for n, name in enumerate(_NAMES.split(), 1) for length in (3, 9)} | {"sept": 9}
_DAY = r"(?P<day>[0-9]{1,2})(?:\s?(?:st|nd|rd|th))?"
_MONTH = r"(?P<month>[a-z]{3,9})\.?"
_YEAR = r"(?:(?:\s*,\s*|\s+)(?P<year>[0-9]{4}))?"
_FORMS = (
    re.compile(rf"{_MONTH}\s+(?:the\s+)?{_DAY}{_YEAR}"),
    re.compile(rf"(?:the\s+)?{_DAY}\s+(?:of\s+)?{_MONTH}{_YEAR}"),
    re.compile(rf"(?P<year>[0-9]{{4}})[-/.\s]\s*(?:{_MONTH}|(?P<number>[0-9]{{1,2}}))[-/.\s]\s*{_DAY}"),
)

Date = tuple[int, int, int]
"""Year (0 if none is named), month, day."""


@lru_cache(maxsize=8192)
def date(content: str) -> Date | None:
    """The day that a text names, or None."""
    if len(content) > MAX_CHARS or not any(map(str.isdigit, content)):
        return None
    text = common_notation(content).lower().strip(" .")
    if (match := next(filter(None, (form.fullmatch(text) for form in _FORMS)), None)) is None:
        return None
    named = match.groupdict()
    month = int(named.get("number") or 0) or _MONTHS.get(named.get("month") or "", 0)
    day = int(named["day"])
    return (int(named["year"] or 0), month, day) if 1 <= month <= 12 and 1 <= day <= 31 else None


ClockTime = tuple[int, int, int, str]
"""(hour, minute, second, "a" | "p" | "0" for an hour of two digits below ten, which is before noon | "")."""

_CLOCK = re.compile(
    r"(?:at )?([0-9]{1,2})(?::([0-5][0-9])(?::([0-5][0-9]))?)?\s*(?:(a|p)\.?\s?m\.?|h(?:ours)?|o'clock)?",
    re.ASCII | re.IGNORECASE,
)


@lru_cache(maxsize=8192)
def time_of_day(content: str) -> ClockTime | None:
    """The time of day that a text names; None if it names none."""
    match = _CLOCK.fullmatch(common_notation(content)) if len(content) <= 40 else None
    if match is None or int(match[1]) > 24 or (match[2] is None and match[4] is None):
        return None
    hour = int(match[1])
    half = (match[4] or "").lower()
    if half and not 1 <= hour <= 12:
        return None
    zero = "" if match[1].startswith(("1", "2")) or len(match[1]) == 1 else "0"
    return hour, int(match[2] or 0), int(match[3] or 0), half or zero


def same_time(reference: ClockTime, answer: ClockTime) -> bool:
    """Whether two times of day are the same.

    A marker in the reference must be met (3:45 PM is 15:45). An answer's own marker must fit an hour that
    only one half of the day has; beside another hour it does no harm.
    """
    if reference[1:3] != answer[1:3]:
        return False
    if reference[3] in ("a", "p"):
        return _hour24(reference) == _hour24(answer) and (answer[3] != "" or answer[0] > 12)
    return reference[0] == answer[0] or (
        answer[3] != "" and _hour24(answer) == reference[0] and not 0 < reference[0] < 13
    )


def _hour24(time: ClockTime) -> int:
    hour, _, _, half = time
    if half not in ("a", "p"):
        return hour
    return hour % 12 + 12 if half == "p" else hour % 12
