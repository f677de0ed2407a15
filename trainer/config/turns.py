"""Episodes of several turns: what answers the model's replies (trainer/turns)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.ranges import ranged_field


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What answers a reply, so that the model goes on with another (docs/turns.md)."""

    environment: Literal["off", "again", "calculator", "zoom"] = "off"
    """off: one reply is the whole completion. again: a first reply that is not right is told so, once.
    calculator: a tool for arithmetic. zoom: a tool that returns a part of a picture, enlarged."""
    limit: int = ranged_field(4, least=2, most=64)
    """Most replies of an episode. One that is cut off by it is not finished, and its last reply is graded."""
    image_pixels: int = ranged_field(256 * 28 * 28, least=1)
    """Area of a picture that `zoom` returns, in pixels."""


def images_of(turns: Turns) -> int:
    """Most images that the observations of an episode can have."""
    return turns.limit - 1 if turns.environment == "zoom" else 0
