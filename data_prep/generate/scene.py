"""A generated image as a list of marks on white, which can be drawn, and can be read by a program."""

from __future__ import annotations

import hashlib
import io
import json
import random
from dataclasses import dataclass, field
from typing import Any, Literal

from PIL import Image, ImageDraw, ImageFont

SMALLEST = (200, 150)
"""Smallest size of an image, pixels."""
LARGEST = (800, 600)
"""Largest size of an image, pixels."""
SMOOTH = 2
"""Factor by which marks are drawn larger before they are averaged, so that sloped lines have no stairs."""
BLACK = (20, 20, 20)
WHITE = (255, 255, 255)
COLORS = {
    "red": (214, 39, 40),
    "green": (34, 150, 60),
    "blue": (35, 90, 200),
    "orange": (255, 140, 0),
    "purple": (130, 60, 170),
}
Point = tuple[float, float]
Color = tuple[int, int, int]


@dataclass(frozen=True)
class Mark:
    """One thing on the image. Positions are in pixels from the upper left corner."""

    kind: Literal["line", "polygon", "ellipse", "text"]
    points: tuple[Point, ...]
    """Corners of a line or polygon, two corners of the box of an ellipse, or the middle of a text."""
    color: Color = BLACK
    width: float = 1.0
    """Width of a line or outline, 0 for a filled shape; height of the font of a text."""
    text: str = ""


@dataclass
class Scene:
    """An image as marks, which families of problems add."""

    width: int
    height: int
    marks: list[Mark] = field(default_factory=list)

    @classmethod
    def sized(cls, rng: random.Random, least: tuple[float, float] = SMALLEST) -> Scene:
        """An empty image of a random size, not below `least`, where the content needs room."""
        share = rng.random()
        sides = []
        for low, small, large in zip(least, SMALLEST, LARGEST, strict=True):
            floor = min(large, max(small, int(low)))
            portion = min(1.0, max(0.0, share + rng.uniform(-0.08, 0.08)))
            sides.append(round(floor + (large - floor) * portion))
        return cls(sides[0], sides[1])

    @property
    def font(self) -> float:
        """Height of ordinary text, pixels."""
        return max(12.0, min(self.width, self.height) / 22)

    def line(self, *points: Point, color: Color = BLACK, width: float = 1.0) -> None:
        """An open line through all points."""
        self.marks.append(Mark("line", points, color, width))

    def polygon(self, *points: Point, color: Color = BLACK, width: float = 0.0) -> None:
        """A closed shape, filled unless its outline has a width."""
        self.marks.append(Mark("polygon", points, color, width))

    def ellipse(self, x: float, y: float, radius: float, color: Color = BLACK, width: float = 0.0) -> None:
        """A circle around (x, y)."""
        self.marks.append(Mark("ellipse", ((x - radius, y - radius), (x + radius, y + radius)), color, width))

    def text(self, x: float, y: float, text: Any, size: float = 0.0, color: Color = BLACK) -> None:
        """A text with its middle at (x, y)."""
        self.marks.append(Mark("text", ((x, y),), color, size or self.font, str(text)))

    @property
    def digest(self) -> str:
        """Hash of the marks, equal for equal images."""
        return hashlib.sha256(repr((self.width, self.height, self.marks)).encode()).hexdigest()

    def png(self) -> bytes:
        image = Image.new("RGB", (self.width * SMOOTH, self.height * SMOOTH), WHITE)
        draw = ImageDraw.Draw(image)
        for mark in self.marks:
            points = [(x * SMOOTH, y * SMOOTH) for x, y in mark.points]
            width = round(mark.width * SMOOTH)
            match mark.kind:
                case "line":
                    draw.line(points, fill=mark.color, width=max(1, width), joint="curve")
                case "polygon" if width:
                    draw.line([*points, *points[:2]], fill=mark.color, width=width, joint="curve")
                case "polygon":
                    draw.polygon(points, fill=mark.color)
                case "ellipse":
                    box = (*points[0], *points[1])
                    if width:
                        draw.ellipse(box, None, mark.color, width)
                    else:
                        draw.ellipse(box, mark.color, None, 1)
                case "text":
                    font = ImageFont.load_default(mark.width * SMOOTH)
                    draw.text(points[0], mark.text, fill=mark.color, font=font, anchor="mm")
        buffer = io.BytesIO()
        image.reduce(SMOOTH).save(buffer, format="PNG")
        return buffer.getvalue()


@dataclass(frozen=True)
class Problem:
    """One question about a scene."""

    scene: Scene
    kind: str
    """Kind of question within the family."""
    question: str
    answer: str
    facts: Any
    """JSON values that decide the answer. Equal problems have equal facts, however they are drawn."""

    @property
    def key(self) -> str:
        """Hash of the problem without size, place and color of its drawing."""
        return hashlib.sha256(json.dumps([self.kind, self.question, self.facts]).encode()).hexdigest()
