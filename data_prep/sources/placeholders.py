"""Where the images of a record stand in its texts, whichever way the texts name them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from data_prep.sources.row_source import BadRecord

_MARK = re.compile(
    r"""
    (?:Picture\ \d+:\s*)?<img>(?P<path>[^<>]*)</img>\n?
    | !\[[^\[\]\n]*\]\( (?P<markdown>[^()\s]+) (?:\s+"[^"\n]*")? \)
    | <img\s[^<>]*?src\s*=\s*["'](?P<source>[^"'<>]*)["'][^<>]*>
    | <\|vision_start\|><\|image_pad\|><\|vision_end\|>
    | <image(?:[ _:-]?(?P<number>\d{1,3}))?>
    | <\|image(?:_(?P<phi>\d{1,3}))?\|>
    | <image[_ ](?:placeholder|token|here)> | <imagehere>
    | <img> | \[(?:img|image)\]
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""How texts of published sets name an image: of Qwen-VL, Markdown, HTML, Qwen2-VL, LLaVA and MMMU, Phi,
DeepSeek, InternLM."""


def is_marked(text: str) -> bool:
    """Whether a text names an image."""
    return _MARK.search(text) is not None


class ImagePlaces:
    """Puts a record's images where its texts name them, in the order of the texts.

    `<image>` is the next of the images beside the texts, `<image 2>` the one of that number,
    `<img>PATH</img>` the one at the path. Whether placeholders and images are equally many
    is judged later, like everything about a row.
    """

    def __init__(self, beside: Sequence[Any], numbered: Mapping[int, Any] | None = None) -> None:
        """beside: images beside the texts. numbered: the same by their columns' numbers, else by position."""
        self.beside = beside
        self.numbered = numbered or dict(enumerate(beside, 1))
        self.images: list[Any] = []
        """Images in the order of the placeholders made so far."""
        self._taken = 0
        self._numbers: set[int] = set()

    def content(self, text: str) -> str | list[dict[str, str]]:
        """The content of a turn: its text, or parts where it names an image."""
        parts: list[dict[str, str]] = []
        position = 0
        for mark in _MARK.finditer(text):
            _add_text(parts, text[position : mark.start()])
            parts.append({"type": "image"})
            self._place(mark)
            position = mark.end()
        if not parts:
            return text
        _add_text(parts, text[position:])
        return parts

    def part(self, image: Any) -> list[dict[str, str]]:
        """A part of a turn that is an image: the one it names, or the next beside the texts."""
        if image is None:
            image = next(iter(self.beside[self._taken : self._taken + 1]), None)
            self._taken += 1
        self.images += [] if image is None else [image]
        return [{"type": "image"}]

    def _place(self, mark: re.Match[str]) -> None:
        path = next((mark[name] for name in ("path", "markdown", "source") if mark[name] is not None), None)
        written = mark["number"] or mark["phi"]
        if path is not None:
            self.images.append(path)
            self._numbers.update(n for n, beside in self.numbered.items() if beside == path)
        elif written is not None:
            number = int(written)
            if number not in self.numbered:
                raise BadRecord(
                    "image_count", f"{mark[0]} is named, and there are {len(self.numbered)} images"
                )
            self._numbers.add(number)
            self.images.append(self.numbered[number])
        else:
            self.images += self.beside[self._taken : self._taken + 1]
            self._taken += 1

    def finish(self) -> list[Any]:
        """All images. Raises BadRecord where numbers leave one out, or stand among marks without one."""
        if self._numbers and self._taken:
            raise BadRecord("image_count", "some images are named by number and some are not")
        if self._numbers:
            unnamed = sorted(self.numbered.keys() - self._numbers)
            if unnamed:
                raise BadRecord("image_count", f"no text names image {', '.join(map(str, unnamed))}")
            return self.images
        return [*self.images, *self.beside[self._taken :]]

    def first(self, text: str) -> list[dict[str, str]]:
        """The content of a turn that all images stand before, as its text names none."""
        self.images += self.beside
        self._taken = len(self.beside)
        parts = [{"type": "image"}] * len(self.beside)
        _add_text(parts, text)
        return parts


def _add_text(parts: list[dict[str, str]], text: str) -> None:
    if text.strip():
        parts.append({"type": "text", "text": text.strip()})
