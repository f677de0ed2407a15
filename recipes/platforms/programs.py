"""The platforms' own programs: where they are, and what they print."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAUNCHERS = (
    "run `bash trainer/shell/setup.sh launch`, or install it yourself "
    "(requirements/launch.txt has the version)"
)
"""How to get SkyPilot and dstack."""


def find_program(program: str) -> str:
    """Path of a program: on the PATH, or in the launch environment; empty if neither has it."""
    if on_path := shutil.which(program):
        return on_path
    own = Path(".venvs/launch/bin") / program
    return str(own.absolute()) if own.is_file() else ""


def printed_text(command: Sequence[str]) -> str:
    """What a platform's program prints; "" where it is not here, or fails."""
    program = find_program(command[0])
    if not program:
        return ""
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, errors="replace")
    return "" if done.returncode else done.stdout


def printed_json(command: Sequence[str]) -> Any:
    """The JSON that a platform's program prints; None if there is none."""
    # Hints come before it, and colors: an escape sequence has a bracket of its own.
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed_text(command))
    for start in re.finditer(r"[\[{]", text):
        try:
            return json.JSONDecoder().raw_decode(text, start.start())[0]
        except json.JSONDecodeError:
            continue
    return None


def last_line(printed: str, none: str = "no word") -> str:
    """The last line of what a program printed, which says why it failed."""
    return (printed.strip() or none).splitlines()[-1].removeprefix("error: ")
