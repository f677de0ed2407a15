"""A tool that runs Python, in processes beside the engine that can do nothing but compute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainer.system.process_set import MAX_STRETCH, Guard
from trainer.turns.calls import BadCallError
from trainer.turns.episode import Observation, Situation
from trainer.turns.python_process import LONGEST, MODULES
from trainer.turns.tool import MOST_BYTES, ToolProcesses

SPARE_S = 10.0
"""Seconds beyond a program's longest after which the process around it is ended, too."""
BARE = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}
"""All that programs find of the environment: equal programs print the same, and no key is there to print."""


class Python:
    """A `Tool`."""

    shows_images = False
    slow = True
    schema: dict[str, Any] = {
        "name": "python",
        "description": "Runs a Python program and returns what it prints, and the value of an expression at"
        f" its end. It can import {', '.join(MODULES)}; it has no files and no network, and earlier programs"
        " leave nothing behind.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "For example: print(sum(range(10)))"}},
            "required": ["code"],
        },
    }

    def __init__(self, seconds: float) -> None:
        """seconds: for one program. Raises ConfigError where the machine cannot lock a process up."""
        guard = Guard(
            maker="trainer.turns.python_process:Programs",
            arguments=[str(seconds)],
            key="turns.environment python",
            most_bytes=MOST_BYTES,
            environment=BARE,
        )
        self.processes = ToolProcesses(guard, MAX_STRETCH * seconds + SPARE_S)
        self.processes.about()

    def use(self, situation: Situation, arguments: Mapping[str, Any]) -> Observation:
        """`Tool.use`."""
        code = arguments.get("code")
        if not isinstance(code, str):
            raise BadCallError('"code" is not a text')
        if len(code) > LONGEST:
            raise BadCallError(f"the program is longer than {LONGEST} characters")
        said = json.loads(self.processes.ask(code.encode(errors="replace")))
        if "wrong" in said:
            raise BadCallError(said["wrong"])
        return Observation(said["text"])
