"""An environment of one tool: a reply that calls it is answered, any other ends the episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trainer.turns.calls import SHOWN, BadCallError, call_in, offered
from trainer.turns.episode import ERROR, FAILED, Environment, Observation, Situation, whole_characters
from trainer.turns.tool_processes import ToolFailure


class Tool(Protocol):
    """What a reply can call."""

    schema: dict[str, Any]
    """JSON schema of the function, with name and description."""
    shows_images: bool
    slow: bool
    """As `Environment.slow`."""

    def use(self, situation: Situation, arguments: Mapping[str, Any]) -> Observation:
        """The result of a call. Raises BadCallError, and ToolFailure if it is slow."""


class ToolEnvironment(Environment):
    """One tool, which replies call."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self.tools: Sequence[dict[str, Any]] = (offered(**tool.schema),)
        self.shows_images = tool.shows_images
        self.slow = tool.slow

    def answer(self, situation: Situation, replies: Sequence[str]) -> Observation | None:
        """`Environment.answer`."""
        try:
            call = call_in(replies[-1])
            if call is None:
                return None
            if call.name != self.tool.schema["name"]:
                named = call.name[:SHOWN]
                raise BadCallError(f"there is no tool {named!r}, only {self.tool.schema['name']}")
            return self.tool.use(situation, call.arguments)
        except BadCallError as error:
            return Observation(whole_characters(f"{ERROR}{error}"))
        except (ToolFailure, ValueError) as failure:
            return Observation(whole_characters(f"{FAILED}{failure}"))
