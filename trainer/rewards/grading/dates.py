"""Dates with the month in words or the year first: `June 5, 2020`, `5th of June 2020`, `2020-06-05`.

`5/6/2020` names two days, so it equals itself alone; `25/12/2020` names one.
"""

from __future__ import annotations

import re
from functools import lru_cache

from trainer.rewards.grading.notation import common_notation

MAX_CHARS = 60
_NAMES = "january february march april may june july august september october november december"
_MONTHS = {}
for _number, _name in enumerate(_NAMES.split(), 1):
    _MONTHS[_name] = _number
    _MONTHS[_name[:3]] = _number
_MONTHS["sept"] = 9
_DAY = r"(?P<day>[0-9]{1,2})(?:\s?(?:st|nd|rd|th))?"
_MONTH = r"(?P<month>[a-z]{3,9})\.?"
_YEAR = r"(?:(?:\s*,\s*|\s+)(?P<year>[0-9]{4}))?"
_FORMS = (
    re.compile(rf"{_MONTH}\s+(?:the\s+)?{_DAY}{_YEAR}"),
    re.compile(rf"(?:the\s+)?{_DAY}\s+(?:of\s+)?{_MONTH}{_YEAR}"),
    re.compile(rf"(?P<year>[0-9]{{4}})[-/.\s]\s*(?:{_MONTH}|(?P<number>[0-9]{{1,2}}))[-/.\s]\s*{_DAY}"),
)
_NUMBERS = re.compile(r"([0-9]{1,2})[-/.]([0-9]{1,2})[-/.]([0-9]{4})")
_CHINESE = re.compile(
    r"(?:(?P<year>[0-9]{4})\s*年\s*)?(?P<number>[0-9]{1,2})\s*月\s*(?P<day>[0-9]{1,2})\s*[日号]"
)

Date = tuple[int, int, int]
"""Year (0 if none is named), month, day."""


@lru_cache(maxsize=8192)
def date(content: str) -> Date | None:
    """The day that a text names, or None."""
    if len(content) > MAX_CHARS or not any(map(str.isdigit, content)):
        return None
    text = common_notation(content).lower().strip(" .")
    both = _NUMBERS.fullmatch(text)
    if both is not None:
        first, second, year = map(int, both.groups())
        if first > 12:
            return _valid(year, second, first)
        return _valid(year, first, second) if second > 12 or first == second else None
    for form in (*_FORMS, _CHINESE):
        match = form.fullmatch(text)
        if match is None:
            continue
        found = match.groupdict()
        month = int(found.get("number") or 0) or _MONTHS.get(found.get("month") or "", 0)
        return _valid(int(found["year"] or 0), month, int(found["day"]))
    return None


def _valid(year: int, month: int, day: int) -> Date | None:
    return (year, month, day) if 1 <= month <= 12 and 1 <= day <= 31 else None
