"""MathV60K (VerMulti): `*_message.jsonl` and the images beside it, from the hub, a mirror folder or local files.

A line holds `question`, `answer` (`$\\boxed{B}$`) and `message`, a JSON list inside a string, whose images are paths
of the machine that wrote it: absolute, `file://`, relative or bare, with slashes possibly escaped. Lines are parsed,
never rewritten as text; `wanted.py` finds the member of the archive that a path means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from data_prep.ingest.archive import Member, Refused, members, unpacked_bytes
from data_prep.ingest.hub import Progress, Repository
from data_prep.sources.source import Candidate, Problem, unboxed
from trainer.config import ConfigError

REPO = "VLM-Reasoner/VerMulti"
FILES = {
    "mathv60k": ("mathv60k_message.jsonl", "mathv60k_img.tar.gz"),
    "mathv-geo": ("mathv_geo_message.jsonl", "mathv_geo_img.tar.gz"),
}
"""Rows and images of each of the two sets in the repository."""
RAW_CHARS = 2000
"""How much of an unreadable line goes into the quarantine file."""


@dataclass
class MessageFile:
    """A `*_message.jsonl` with its archive or folder of images."""

    name: str
    jsonl: Path
    images: Path
    revision: str = ""
    record: Callable[[], list[dict[str, Any]]] = list
    """Gives `files`; may wait until they are hashed."""
    split: str = ""
    """The split that all its rows belong to; empty: to be split."""

    @property
    def files(self) -> list[dict[str, Any]]:
        """[{"path", "bytes", "sha256"}] of both."""
        return self.record()

    def rows(self) -> Iterator[Candidate | Problem]:
        """Parses line by line."""
        with open(self.jsonl, "rb") as file:
            for index, line in enumerate(file):
                if line.strip():
                    yield self.parse(index, line)

    def parse(self, index: int, line: bytes) -> Candidate | Problem:
        """One line. A line that does not hold what it should is a Problem, never an exception."""
        import orjson

        def problem(reason: str, detail: str) -> Problem:
            return Problem(index, reason, detail, line[:RAW_CHARS].decode("utf-8", "replace"))

        try:
            raw = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            return problem("bad_json", str(error))
        if not isinstance(raw, dict) or not isinstance(raw.get("answer"), (str, int, float)):
            return problem("no_answer_field", "the line is no object with an `answer`")
        message = raw.get("message")
        if isinstance(message, str):
            try:
                message = orjson.loads(message)
            except orjson.JSONDecodeError as error:
                return problem("bad_message", f"`message` is not JSON: {error}")
        try:
            messages, images = chat(message)
        except ValueError as error:
            return problem("bad_message", str(error))
        return Candidate(
            index=index,
            source="/".join(filter(None, [self.name, subsource(images[0]) if images else ""])),
            messages=messages,
            images=images,
            answer=unboxed(str(raw["answer"])),
            solution=str(raw.get("solution") or ""),
            split=self.split,
        )

    def members(self, refused: Refused) -> Iterator[Member]:
        """Images of the archive or folder."""
        return members(self.images, refused)

    def image_bytes(self) -> int:
        """Size of the unpacked images."""
        return unpacked_bytes(self.images)


def chat(message: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages with image placeholders, and the images' paths. Raises ValueError where the chat is malformed.

    A turn of the assistant is dropped: the answer is what the model is asked for.
    """
    if not isinstance(message, list) or not message:
        raise ValueError("`message` is no list of turns")
    messages: list[dict[str, Any]] = []
    images: list[str] = []
    for turn in message:
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise ValueError("a turn has no role")
        content = turn.get("content")
        if turn["role"] == "assistant":
            continue
        if isinstance(content, str):
            messages.append({"role": turn["role"], "content": content})
            continue
        if not isinstance(content, list):
            raise ValueError(f"the {turn['role']} turn has no content")
        entries: list[dict[str, str]] = []
        for entry in content:
            kind = entry.get("type") if isinstance(entry, dict) else None
            if kind == "text" and isinstance(entry.get("text"), str):
                entries.append({"type": "text", "text": entry["text"]})
            elif kind in ("image", "image_url"):
                path = entry.get("image") or entry.get("image_url")
                path = path.get("url") if isinstance(path, dict) else path
                if not isinstance(path, str):
                    raise ValueError("an image entry has no path")
                images.append(normalized(path))
                entries.append({"type": "image"})
            else:
                raise ValueError(f"content of an unknown kind {kind!r}")
        messages.append({"role": turn["role"], "content": entries})
    if not any(m["role"] == "user" for m in messages):
        raise ValueError("there is no user turn")
    return messages, images


@lru_cache(maxsize=1 << 16)
def normalized(path: str) -> str:
    """An image's path without scheme, backslashes, `.` and leading slash; `..` is kept, and then matches nothing."""
    path = re.sub(r"^file:(//(localhost)?(?=/))?", "", path.strip()).replace("\\/", "/").replace("\\", "/")
    return str(PurePosixPath("/" + path)).lstrip("/")


@lru_cache(maxsize=1 << 16)
def subsource(path: str) -> str:
    """The source set that an image's folder names (`mathv60k_img/IconQA/images/7.png` -> `IconQA`), or empty."""
    parts = PurePosixPath(path).parts
    tops = [i for i, part in enumerate(parts) if part.endswith("_img")]
    inside = parts[tops[-1] + 1 : -1] if tops else ()
    return inside[0] if inside and inside[0] not in ("images", "image", "train", "test") else ""


def sources(repository: Repository, on_progress: Progress, name: str = "mathv60k") -> list[MessageFile]:
    """One of the two sets of the repository: `mathv60k` or `mathv-geo`."""
    rows, images = repository.fetch(FILES[name], on_progress)
    return [MessageFile(name, rows.local, images.local, repository.revision, lambda: [rows.record, images.record])]


def local(jsonl: str | Path, images: str | Path, name: str = "mathv60k", split: str = "") -> MessageFile:
    """The source made of a local jsonl and an archive or folder, hashed meanwhile. ConfigError if one is missing."""
    for path, what in ((jsonl, "jsonl"), (images, "image archive or folder")):
        if not Path(path).exists():
            raise ConfigError(f"no {what} at {path}")
    hashing = ThreadPoolExecutor(1)
    record = hashing.submit(_recorded, [path for path in (Path(jsonl), Path(images)) if path.is_file()])
    hashing.shutdown(wait=False)
    return MessageFile(name, Path(jsonl), Path(images), record=record.result, split=split)


def _recorded(paths: list[Path]) -> list[dict[str, Any]]:
    from trainer.data.dataset import sha256_of

    return [{"path": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths]
