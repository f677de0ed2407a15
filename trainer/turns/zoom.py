"""A tool that shows a part of a picture of the prompt, enlarged (DeepEyes, arXiv 2505.14362)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from trainer.turns.calls import SHOWN, BadCallError, call_in, offered
from trainer.turns.episode import (
    ERROR,
    FAILED,
    Environment,
    Observation,
    SeenPicture,
    Situation,
    whole_characters,
)

LARGEST = 1_000_000
"""Pixels that no picture has in a row."""
LEAST_SIDE = 4
"""Pixels of a box's shorter side, at least."""
MOST_ASPECT = 20
"""Times that a box may be longer than it is wide; processors refuse images beyond 200."""


class Zoom(Environment):
    """A call of the tool is answered, any other reply ends the episode. A crop depends on the row's picture
    and the box alone."""

    shows_images = True
    tools: Sequence[dict[str, Any]] = (
        offered(
            "zoom",
            "Shows a part of a picture, enlarged.",
            {
                "type": "object",
                "properties": {
                    "box": {
                        "type": "array",
                        "items": {"type": "number"},
                        "description": "[x1, y1, x2, y2]: left, top, right and bottom of the part, in pixels"
                        " of the picture from its upper left corner",
                    },
                    "image": {
                        "type": "integer",
                        "description": "Number of the picture, from 1; 1 if left out",
                    },
                },
                "required": ["box"],
            },
        ),
    )

    def __init__(self, image_pixels: int) -> None:
        """image_pixels: largest area of what is shown."""
        self.image_pixels = image_pixels

    def answer(self, situation: Situation, replies: Sequence[str]) -> Observation | None:
        """`Environment.answer`."""
        try:
            call = call_in(replies[-1])
            if call is None:
                return None
            if call.name != "zoom":
                raise BadCallError(f"there is no tool {call.name[:SHOWN]!r}, only zoom")
            return self._enlarged(situation, call.arguments)
        except BadCallError as error:
            return Observation(whole_characters(f"{ERROR}{error}"))
        except ValueError as failure:
            return Observation(whole_characters(f"{FAILED}{failure}"))

    def _enlarged(self, situation: Situation, arguments: Mapping[str, Any]) -> Observation:
        if not situation.pictures:
            raise BadCallError("there is no picture")
        number = arguments.get("image", 1)
        if type(number) is not int or not 1 <= number <= len(situation.pictures):
            raise BadCallError(f"there are pictures 1 to {len(situation.pictures)}")
        picture = situation.pictures[number - 1]
        box = checked_box(arguments.get("box"), picture.seen)
        part = picture.image.crop(in_original(box, picture))
        size = shown_size(box, self.image_pixels, situation.cell)
        shown = part.resize(size, Image.Resampling.BICUBIC)
        numbers = ", ".join(f"{value:g}" for value in box)
        caption = f"Picture {number}, box [{numbers}], in {size[0]} x {size[1]} pixels:"
        return Observation(caption, (shown,))


def checked_box(box: Any, seen: tuple[int, int]) -> tuple[float, float, float, float]:
    """A box within a picture of this width and height. Raises BadCallError."""
    width, height = seen
    if not isinstance(box, list) or len(box) != 4:
        raise BadCallError('"box" is not a list of four numbers [x1, y1, x2, y2]')
    for value in box:
        # By comparison, which no integer is too large for, and which NaN fails.
        if type(value) not in (int, float) or not -LARGEST < value < LARGEST:
            raise BadCallError('"box" has something else than numbers of pixels')
    left, top, right, bottom = box
    if left >= right or top >= bottom:
        raise BadCallError("the box is empty: x1 must be less than x2, and y1 less than y2")
    if left < 0 or top < 0 or right > width or bottom > height:
        raise BadCallError(
            f"the box is not within the picture, which is {width} pixels wide and {height} high"
        )
    sides = sorted((right - left, bottom - top))
    if sides[0] < LEAST_SIDE or sides[1] > MOST_ASPECT * sides[0]:
        raise BadCallError(
            f"the box is too thin: at least {LEAST_SIDE} pixels, and {MOST_ASPECT} times longer at most"
        )
    return float(left), float(top), float(right), float(bottom)


def in_original(box: tuple[float, float, float, float], picture: SeenPicture) -> tuple[int, int, int, int]:
    """A box in pixels of the picture as it was decoded: all pixels that it touches."""
    across = picture.image.width / picture.seen[0]
    down = picture.image.height / picture.seen[1]
    left, top, right, bottom = box
    return (
        math.floor(left * across),
        math.floor(top * down),
        min(math.ceil(right * across), picture.image.width),
        min(math.ceil(bottom * down), picture.image.height),
    )


def shown_size(box: tuple[float, float, float, float], most_pixels: int, cell: int) -> tuple[int, int]:
    """Width and height that a box is shown in: about its shape, of whole cells, `most_pixels` at most."""
    cells = max(1, most_pixels // cell**2)
    aspect = (box[2] - box[0]) / (box[3] - box[1])
    across = min(max(round(math.sqrt(cells * aspect)), 1), cells)
    down = min(max(round(across / aspect), 1), cells // across)
    return across * cell, down * cell
