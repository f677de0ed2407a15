"""The form of the prompts that a model was trained with: the system message, and where images stand.

It is kept beside exported weights, so that an evaluation asks the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.schema import content_text

Messages = list[dict[str, Any]]
FILE = "asked.json"
LOOKED_AT = 64
"""Rows that the record is made from."""
VARIES = "varies"


@dataclass(frozen=True)
class PromptForm:
    """What the rows of a run had in common."""

    system: str = ""
    """The system message; empty: the rows had none."""
    images: str = VARIES
    """`first`: all images before the text of a question; `last`: behind it; `varies`: neither."""

    @classmethod
    def of(cls, chats: Iterable[Messages]) -> PromptForm | None:
        """The record of a run's chats as the model read them; None where their system messages differ."""
        systems, places = set(), set()
        for first, *rest in chats:
            systems.add(content_text(first["content"]) if first["role"] == "system" else "")
            places |= {_place(message["content"]) for message in (first, *rest)} - {""}
        if len(systems) != 1:
            return None
        return cls(systems.pop(), places.pop() if len(places) == 1 else VARIES)

    @classmethod
    def read(cls, folder: str | Path) -> PromptForm | None:
        """The record in a model's folder; None where there is none."""
        file = Path(folder) / FILE
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None

    def write(self, folder: Path) -> None:
        """Puts the record into a model's folder."""
        text = json.dumps({"system": self.system, "images": self.images}, indent=1, ensure_ascii=False)
        (folder / FILE).write_text(f"{text}\n", encoding="utf-8")

    def ask(self, messages: Messages) -> Messages:
        """Puts another row's chat into this form."""
        turns = []
        if self.system:
            turns.append({"role": "system", "content": self.system})
        for message in messages:
            if message["role"] == "system":
                continue
            if self.images != VARIES:
                message = message | {"content": _placed(message["content"], self.images)}
            turns.append(message)
        return turns


def _place(content: Any) -> str:
    """Where the images of a turn stand; empty for a turn without images or without text."""
    if isinstance(content, str):
        return ""
    kinds = [part["type"] for part in content]
    images = kinds.count("image")
    if images in (0, len(kinds)):
        return ""
    if set(kinds[:images]) == {"image"}:
        return "first"
    return "last" if set(kinds[-images:]) == {"image"} else VARIES


def _placed(content: Any, images: str) -> Any:
    """A turn's content with its images first or last; as it is where they stand amid the text."""
    if _place(content) in ("", VARIES, images):
        return content
    # Sorting keeps the order of the images, and that of the texts.
    return sorted(content, key=lambda part: part["type"] == "image", reverse=images == "first")
