"""The environment of a run."""

from __future__ import annotations

from functools import cache
from typing import Any

from trainer.config import Turns
from trainer.turns.episode import Environment
from trainer.turns.own_environment import OwnEnvironment
from trainer.turns.zoom import Zoom


@cache
def environment_of(turns: Turns) -> Environment | None:
    """What answers replies; None: a reply is the whole completion. Raises ConfigError for a user's that
    cannot be loaded, or cannot be used."""
    match turns.environment:
        case "off":
            return None
        case "zoom":
            return Zoom(turns.image_pixels)
    return OwnEnvironment(turns)


def tools_of(turns: Turns) -> list[dict[str, Any]]:
    """Schemas of the tools that a run's prompts offer."""
    environment = environment_of(turns)
    return list(environment.tools) if environment else []
