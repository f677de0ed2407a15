"""What an environment is: it reads a row and the replies so far, and says what comes back.

An episode is prompt, reply, observation, reply, ... and its last reply is graded as any completion is. An
environment is a pure function: equal rows and replies give equal observations, on every rank and after a
restart. So replies are logged, and pictures that were shown are made again where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from PIL import Image

from trainer.algorithm.traces import Verdict

ERROR = "Error: "
"""What the observation of a call begins with that could not be answered."""


@dataclass(frozen=True, eq=False)
class SeenPicture:
    """One image of a row."""

    image: Image.Image
    """As it was decoded."""
    seen: tuple[int, int]
    """Width and height in pixels as the model saw it, after the processor's resizing."""


@dataclass(frozen=True, eq=False)
class Situation:
    """What an environment knows of a row."""

    pictures: Sequence[SeenPicture]
    verdict: Callable[[str], Verdict | None]
    """What the grader says of a reply at once; None where an expression must be evaluated."""
    cell: int = 28
    """The model's images have sides that are multiples of this many pixels, each cell one token."""


@dataclass(frozen=True, eq=False)
class Observation:
    """What comes back for a reply."""

    text: str
    images: Sequence[Image.Image] = ()
    """Shown behind the text."""
    role: Literal["user", "tool"] = "tool"
    """Who says it, in the words of chat templates."""


class Environment(Protocol):
    """What answers replies."""

    tools: Sequence[dict[str, Any]]
    """What the prompt says of its tools: JSON schemas of functions, as chat templates take them."""
    shows_images: bool
    """Whether observations may have images."""

    def answer(self, situation: Situation, replies: Sequence[str]) -> Observation | None:
        """The observation for the last of the replies, which are texts; None: the episode has ended.

        It takes milliseconds for any text, and raises nothing: what is wrong with a reply is said in the
        observation.
        """
