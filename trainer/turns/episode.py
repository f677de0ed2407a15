"""What an environment is: it reads a row and the replies so far, and says what comes back.

An episode is prompt, reply, observation, reply, ... and its last reply is graded as any completion is. An
environment is a pure function: equal rows and replies give equal observations, on every rank and after a
restart. So replies are logged, and pictures that were shown are made again where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from PIL import Image

from trainer.algorithm.traces import Verdict
from trainer.images.decoding import ImageLimits, shown_image
from trainer.turns.calls import Call, call_in

ERROR = "Error: "
"""What the observation of a call begins with that could not be answered."""
FAILED = "Tool failure: "
"""What the observation of a call begins with whose tool hung, crashed or gave what cannot be shown."""
SHOWN = ImageLimits(min_side=4, max_image_pixels=16_000_000)
"""Limits of an observation's images. With sides of 1 or 3 processors cannot tell pixels from channels."""


def whole_characters(text: str) -> str:
    """A text with a question mark for each half of a character, which no tokenizer takes."""
    return text.encode(errors="replace").decode()


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
    row: Mapping[str, Any] = field(default_factory=dict)
    """What the row says: id, source, question, reference, answer_type and extra, the dataset's own fields."""
    call: Callable[[str], Call | None] = call_in
    """The call of a tool that a reply makes; None if it makes none. Raises BadCallError, which an environment
    of a user's need not catch: it becomes an observation."""


@dataclass(frozen=True, eq=False)
class Observation:
    """What comes back for a reply."""

    text: str
    images: Sequence[Image.Image] = ()
    """Shown behind the text."""
    role: Literal["user", "tool"] = "tool"
    """Who says it, in the words of chat templates."""

    def __post_init__(self) -> None:
        """Raises ValueError for what no model can be shown."""
        if not isinstance(self.text, str):
            raise ValueError(f"its text is a {type(self.text).__name__}")
        if self.text != whole_characters(self.text):
            raise ValueError("its text has half a character, such as half an emoji")
        images = [shown_image(image, SHOWN) for image in self.images]
        object.__setattr__(self, "images", images)


class Environment(Protocol):
    """What answers replies. One of a user's needs `answer` alone."""

    tools: Sequence[dict[str, Any]] = ()
    """What the prompt says of its tools: JSON schemas of functions, as chat templates take them."""
    shows_images: bool = False
    """Whether observations may have images."""
    replayable: bool = True
    """Whether equal rows and replies give equal observations. Images of one that is not cannot be made
    again."""
    scores: bool = False
    """Whether `score` grades episodes, in place of the run's graders."""
    slow: bool = False
    """Whether to answer may take longer than milliseconds: then it is done beside the engine."""

    def answer(self, situation: Situation, replies: Sequence[str]) -> Observation | None:
        """The observation for the last of the replies, which are texts; None: the episode has ended.

        What is wrong with a reply is said in the observation. One that is not slow raises nothing.
        """

    def answer_again(self, situation: Situation, replies: Sequence[str]) -> Observation | None:
        """What `answer` gave to these replies once, for its images. One that is slow raises ToolFailure."""
        return self.answer(situation, replies)

    def score(self, situation: Situation, replies: Sequence[str]) -> float | None:
        """What a finished episode earned, any finite number; None: its score failed."""
        return None
