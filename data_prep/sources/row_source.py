"""What a dataset's parser hands over, before anything was checked: candidates, problems, and where the
images are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from data_prep.ingest.archive import Member, Refused
from data_prep.ingest.wanted import Wanted
from trainer.data.schema import SPLIT_NAME
from trainer.rewards.grading import grader
from trainer.rewards.grading.extraction import boxed_contents, unbox
from trainer.rewards.grading.stated_answers import first_sentence

SHORT = 200
"""Up to this many characters a text without a marked answer is the answer."""


RAW_CHARS = 2000
"""How much of an unreadable record goes into the quarantine file."""


@dataclass(frozen=True)
class UnreadableRecord:
    """A place in a file where a record should be."""

    detail: str
    raw: str


class BadRecord(Exception):
    """A record that does not hold what it should: (reason, detail)."""


@dataclass(frozen=True)
class Candidate:
    """One row as its source states it."""

    index: int
    """Position in the source, over all its files."""
    source: str
    """Dataset and, where known, sub-source."""
    messages: list[dict[str, Any]]
    """Chat with image placeholders."""
    images: list[str]
    """Names of its images in the source, in the order of the placeholders."""
    answer: str
    """Reference answer, without `$` and `\\boxed`."""
    solution: str = ""
    split: str = ""
    """The source's own split; empty if it has none."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of its own that are kept: pass rates, what a benchmark's scorer wants."""


@dataclass(frozen=True)
class BadRow:
    """A row that could not be read."""

    index: int
    reason: str
    """Short and countable: `bad_json`, `no_message`..."""
    detail: str
    raw: str
    """The start of it, for the quarantine file."""


class Source(Protocol):
    """A dataset as it is published. `rows` can be iterated more than once and yields the same every time."""

    name: str
    revision: str
    """Commit of the hub repository, or empty."""
    notes: Counter[str]
    """What was remarkable about the records when they were last read, counted."""

    @property
    def files(self) -> list[dict[str, Any]]:
        """[{"path", "bytes", "sha256"}] that were read."""
        ...

    def rows(self) -> Iterator[Candidate | BadRow]:
        """All rows, in the source's order."""
        ...

    def members(self, refused: Refused, wanted: Wanted) -> Iterator[Member]:
        """The images, in one pass, all or those that are wanted; what cannot be read is noted in
        `refused`."""
        ...

    def image_bytes(self) -> int:
        """About how many bytes all images have."""
        ...


SPLITS = {"valid": "validation", "val": "validation", "dev": "validation", "testmini": "test"}
"""Other names of splits."""


def split_name(stated: str) -> str:
    """The split that a text names, whatever its case and outer blanks; empty for none.

    Raises BadRecord for one that is no name of files.
    """
    name = stated.strip().lower()
    if name and not SPLIT_NAME.fullmatch(name):
        raise BadRecord("bad_record", f"the split is named {name!r:.80}: use letters, digits, _, - and .")
    return SPLITS.get(name, name)


def unboxed(answer: str) -> str:
    """The content of the last complete `\\boxed{…}`, or the whole text without `$`; outer spaces removed."""
    start = answer.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for position in range(start + 6, len(answer)):
            depth += {"{": 1, "}": -1}.get(answer[position], 0)
            if depth == 0:
                return answer[start + 7 : position].strip()
        start = answer.rfind("\\boxed{", 0, start)
    return answer.strip().strip("$").strip()


def text_of(value: Any) -> str:
    """A scalar as it was written: `true` and not `True`; empty for none."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def stated_answer(text: str) -> str:
    """The answer that a text states: its box, what follows `####` or `answer is`, or all of a short text.

    Raises BadRecord if it has several boxes that differ: none of them is known to be the answer.
    """
    text = text.replace("\\fbox{", "\\boxed{")
    if "\\boxed{" in text:
        _refuse_different(boxed_contents(text))
        return unboxed(text)
    if bare := re.findall(r"\\boxed\s+([^\s$.,]+)", text):
        return bare[-1]
    if "####" in text:
        stated = text.rpartition("####")[2].strip()
        return stated.replace(",", "") if _GROUPED.fullmatch(stated) else stated
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        return unboxed(tagged[-1])
    if phrases := re.findall(r"answer(?: is)?\s*[:=]?\s*\$?([^\n]{1,80}?)\$?\.?\s*$", text, re.IGNORECASE):
        return first_sentence(phrases[-1])
    return unboxed(text) if len(text) <= SHORT else ""


_GROUPED = re.compile(r"[-+]?\$?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
"""A number with separators of thousands."""


def _refuse_different(stated: list[str]) -> None:
    """Raises BadRecord unless all boxes of a text hold one value."""
    first, *others = dict.fromkeys(map(unbox, stated)) or [""]
    for other in others:
        if grader.decide_fast(other, first, grader.classify(first)) != "correct":
            raise BadRecord(
                "conflicting_answers", f"boxes of {first[:60]!r} and {other[:60]!r} in one solution"
            )


def worked(reasoning: str, answer: str) -> str:
    """A worked answer in the format that the model is asked for."""
    return f"<think> {reasoning} </think><answer> $\\boxed{{{answer}}}$ </answer>"
