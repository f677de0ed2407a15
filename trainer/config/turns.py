"""Episodes of several turns: what answers the model's replies (trainer/turns)."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.ranges import ranged_field

BUILT_IN = ("off", "zoom")
"""Values of `turns.environment` that are no file of a user's."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What answers a reply, so that the model goes on with another (docs/turns.md)."""

    environment: str = "off"
    """off: one reply is the whole completion. zoom: a tool that returns a part of a picture, enlarged. Or
    `path/to/file.py:NAME`, an environment of your own."""
    limit: int = ranged_field(4, least=2, most=64)
    """Most replies of an episode. One that is cut off by it is not finished, and its last reply is graded."""
    images: int = ranged_field(0, least=0, most=64)
    """Most images that an episode's observations show; the next ends it. 0: one for each reply that can be
    answered."""
    image_pixels: int = ranged_field(256 * 28 * 28, least=1)
    """Area of a picture that `zoom` returns, in pixels."""
    tool_seconds: float = ranged_field(5.0, above=0)
    """A tool that is slow is ended after this time; the model reads that it failed."""
    tool_steps: int = ranged_field(32, least=0, most=4096)
    """Engine steps after which the result of a slow tool is taken; the engine waits for one that is not there
    by then. So what is computed does not depend on how long a tool takes."""
    tool_workers: int = ranged_field(4, least=1, most=256)
    """Slow tools that run at once beside each engine, in processes of their own."""
    python: str = ""
    """The interpreter of an environment of your own that needs other packages than the trainer has, 3.11 or
    newer with Pillow: `/path/to/venv/bin/python`. Empty: the trainer's."""

    env: str = ""
    """Names of environment variables that an environment of your own gets, separated by commas: it finds no
    token and no setting of the run otherwise."""

    @property
    def own(self) -> bool:
        """Whether the environment is a user's."""
        return self.environment not in BUILT_IN


def images_of(turns: Turns) -> int:
    """Most images that the observations of an episode can have."""
    shows = turns.own or turns.environment == "zoom"
    return (turns.images or turns.limit - 1) if shows else 0
