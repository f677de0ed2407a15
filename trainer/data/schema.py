"""The ONE row format that every dataset is prepared into, and the manifest of a prepared dataset.

A prepared dataset is a directory (or object-store prefix):

    manifest.json                     written last: a directory without it is not a dataset
    {split}-00000-of-00003.parquet    columns as in `COLUMNS`, images inside, pages uncompressed
    quarantine.jsonl                  rows left out, with the reason
    preview.html

The columns are typed for `datasets.load_dataset("parquet", ...)`; `extra` is JSON. `messages` is the
chat, with `{"type": "image"}` placeholders in the order of `images`; content that is one text reads as
a string:

    [{"role": "system", "content": "..."},
     {"role": "user", "content": [{"type": "text", "text": "..."}, {"type": "image"}]}]
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

AnswerType = Literal["letter", "number", "text", "math"]
"""How an answer is compared."""

SPLIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""Name of a split, which begins the names of its files: it leads out of no folder."""
COLUMNS = ("id", "source", "messages", "images", "answer", "answer_type", "solution", "extra", "reading")
FORMAT = 2
LEARNED = "learned_turns"
"""Key of `Row.extra`: numbers of the messages that supervised training learns besides the solution."""
DIFFICULTY = "difficulty"
"""Key of `Row.extra`: level of a generated row, from 1."""

SYSTEM_PROMPT = (
    "Answer the question about the picture. Reason first, inside <think> </think>. "
    "Then give the final answer inside <answer> </answer>, in LaTeX between dollar signs, "
    "with the result itself in one \\boxed{}. "
    "For example: <think> $1+1=2$. </think><answer> $\\boxed{2}$ </answer>"
)
"""System prompt for datasets without one."""
TEXT_SYSTEM_PROMPT = SYSTEM_PROMPT.replace(" about the picture", "")
"""System prompt for questions without an image."""


@dataclass(frozen=True)
class Row:
    """One question."""

    id: str
    """Stable identity: the first 16 hex digits of the sha256 of source, messages and images."""
    source: str
    """Dataset and, where known, its sub-source: `mathv60k/IconQA`."""
    messages: list[dict[str, Any]]
    """Chat with image placeholders."""
    images: list[bytes]
    """Encoded images (PNG, JPEG, WebP) in the order of the placeholders."""
    answer: str
    """Reference answer: the content of the box, without `$` and `\\boxed`."""
    answer_type: AnswerType
    """How the grader compares the answer."""
    solution: str = ""
    """Worked solution for supervised training, or empty: `<think>…</think><answer>…</answer>`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The dataset's own fields of the row, JSON values: `precision`, `choices`, `pass_rate`, `LEARNED`..."""
    reading: str = ""
    """JSON of how the grader reads the answer: kind, parts, order, unit, and what the question asks for
    (`grading.kinds.reading`). Empty in rows that were prepared before it was kept: it is derived."""


@dataclass(frozen=True)
class Manifest:
    """Description of a prepared dataset. `fingerprint` identifies its content."""

    name: str
    revision: str
    rows: dict[str, int]
    """Rows per split."""
    files: list[dict[str, Any]]
    """[{"path", "split", "rows", "bytes", "sha256"}], in row order."""
    images_per_row: dict[str, int] = field(default_factory=dict)
    """Most images of any row, per split; datasets prepared before this was recorded have none."""
    quarantined: dict[str, int] = field(default_factory=dict)
    """Rows left out, per reason."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the preparation: limits, split seed, source files and their hashes."""
    statistics: dict[str, Any] = field(default_factory=dict)
    """Counts for the preview (sources, sizes, token lengths, overlaps); not part of the fingerprint."""
    fingerprint: str = ""
    """sha256 over the files' hashes and the settings."""
    format: int = FORMAT

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file["bytes"] for file in self.files)


def row_id(source: str, messages: list[dict[str, Any]], images: list[bytes]) -> str:
    """Stable id of a row: 16 hex digits of the sha256 over source, messages and images, not the answer."""
    return row_id_of(source, messages, [hashlib.sha256(image).hexdigest() for image in images])


def row_id_of(source: str, messages: list[dict[str, Any]], image_sha256: Sequence[str]) -> str:
    """`row_id` from the images' hashes."""
    digest = hashlib.sha256(json.dumps([source, messages], ensure_ascii=False, sort_keys=True).encode())
    for sha256 in image_sha256:
        digest.update(bytes.fromhex(sha256))
    return digest.hexdigest()[:16]


def count_placeholders(messages: list[dict[str, Any]]) -> int:
    """Number of `{"type": "image"}` entries of a chat."""
    count = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            count += sum(entry.get("type") == "image" for entry in content)
    return count


def content_text(content: str | list[dict[str, Any]]) -> str:
    """The text of one message's content, images left out."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def question_text(messages: list[dict[str, Any]]) -> str:
    """The text of the user's turns, images left out."""
    parts = []
    for message in messages:
        if message.get("role") != "user":
            continue
        content = message["content"]
        if isinstance(content, str):
            parts.append(content)
        else:
            parts += [entry["text"] for entry in content if entry.get("type") == "text"]
    return "\n".join(parts)
