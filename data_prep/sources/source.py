"""What a dataset's parser hands over, before anything was checked: candidates, problems, and where the images are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from data_prep.ingest.archive import Member, Refused


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


@dataclass(frozen=True)
class Problem:
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

    @property
    def files(self) -> list[dict[str, Any]]:
        """[{"path", "bytes", "sha256"}] that were read."""
        ...

    def rows(self) -> Iterator[Candidate | Problem]:
        """All rows, in the source's order."""
        ...

    def members(self, refused: Refused) -> Iterator[Member]:
        """All images, in one pass; unsafe names are noted in `refused`."""
        ...

    def image_bytes(self) -> int:
        """About how many bytes all images have."""
        ...


@dataclass
class TextOnly:
    """Base of sources without images."""

    name: str
    revision: str = ""
    files: list[dict[str, Any]] = field(default_factory=list)

    def members(self, refused: Refused) -> Iterator[Member]:
        """None."""
        return iter(())

    def image_bytes(self) -> int:
        """None."""
        return 0


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


def worked(reasoning: str, answer: str) -> str:
    """A worked answer in the format that the model is asked for."""
    return f"<think> {reasoning} </think><answer> $\\boxed{{{answer}}}$ </answer>"


def with_images(text: str, count: int) -> list[dict[str, str]]:
    """Content of a user turn: placeholders where the text says `<image>`, or all of them first if it does not."""
    content: list[dict[str, str]] = []
    parts = text.split("<image>")
    if len(parts) == 1:
        content += [{"type": "image"}] * count
    for i, part in enumerate(parts):
        content += [{"type": "image"}] if i else []
        content += [{"type": "text", "text": part.strip()}] if part.strip() else []
    return content
