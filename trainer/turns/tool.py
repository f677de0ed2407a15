"""An environment of one tool: a reply that calls it is answered, any other ends the episode. A tool that may
hang, crash, or take all memory runs in processes beside the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trainer.system.process_set import Crashed, Guard, ProcessSet, SetClosed, TookTooMuch
from trainer.turns.calls import SHOWN, BadCallError, call_in, offered
from trainer.turns.episode import ERROR, FAILED, Environment, Observation, Situation, whole_characters

MOST_BYTES = 2 << 30
"""Memory that a process may take for one call."""


class ToolFailure(Exception):
    """What became of a call, for the model to read."""

    def __init__(self, said: str, fault: str = "") -> None:
        """fault: the same for a person, with file and line."""
        super().__init__(said)
        self.fault = fault or said


class ToolProcesses:
    """What calls of a tool are sent to. All methods may be called by several threads."""

    def __init__(self, guard: Guard, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.processes = ProcessSet(guard)

    def about(self) -> dict[str, Any]:
        """What a process says of its tool. Raises ConfigError if it cannot be loaded."""
        return self.processes.about()

    def ask(self, message: bytes, deadline_s: float = 0.0) -> bytes:
        """The reply to a message. deadline_s: another one than usual. Raises ToolFailure."""
        deadline_s = deadline_s or self.deadline_s
        try:
            return self.processes.ask(message, deadline_s)
        except TimeoutError:
            raise ToolFailure(f"no result within {deadline_s:g} seconds") from None
        except TookTooMuch:
            may_gib = self.processes.guard.most_bytes / 2**30
            raise ToolFailure(f"it took more than {may_gib:g} GiB of memory") from None
        except (Crashed, SetClosed):
            raise ToolFailure("the tool crashed") from None

    def close(self) -> None:
        """Ends the processes."""
        self.processes.close()


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
