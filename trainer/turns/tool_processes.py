"""Tools that may hang, crash, or take all memory, in processes beside the engine."""

from __future__ import annotations

from typing import Any

from trainer.system.process_set import Crashed, Guard, ProcessSet, SetClosed, TookTooMuch

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
