"""The environment of a run."""

from __future__ import annotations

from functools import cache
from typing import Any

from trainer.config import Turns
from trainer.turns.calculator import Calculator
from trainer.turns.episode import Environment
from trainer.turns.own_environment import OwnEnvironment
from trainer.turns.python import Python
from trainer.turns.second_try import Again
from trainer.turns.tool import ToolEnvironment
from trainer.turns.zoom import Zoom


@cache
def environment_of(turns: Turns) -> Environment | None:
    """What answers replies; None: a reply is the whole completion. Raises ConfigError for a user's that
    cannot be loaded, or cannot be used."""
    match turns.environment:
        case "off":
            return None
        case "again":
            return Again()
        case "calculator":
            return ToolEnvironment(Calculator())
        case "zoom":
            return ToolEnvironment(Zoom(turns.image_pixels))
        case "python":
            return ToolEnvironment(Python(turns.tool_seconds))
        case _:
            return OwnEnvironment(turns)


def tools_of(turns: Turns) -> list[dict[str, Any]]:
    """Schemas of the tools that a run's prompts offer."""
    environment = environment_of(turns)
    return list(environment.tools) if environment else []
