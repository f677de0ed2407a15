"""Which machine this is, so that a run recognizes one that it has refused before. Standard library only.

An address does not tell: in a container it is the same on every host, and a rented machine has a new one each
time.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

from trainer.checkpoint.attempt import Machine


def this_machine(root: Path = Path("/")) -> Machine:
    """This machine: its host name and its GPUs' own numbers; without GPUs the name alone."""
    found = []
    for path in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        if match := re.search(r"GPU UUID:\s*(GPU-[0-9a-f-]+)", _text(path)):
            found.append(match[1])
    for path in (root / "sys/class/drm").glob("card*/device/unique_id"):
        found.append(f"AMD-{_text(path).strip()}")
    name = socket.gethostname()
    return Machine(name, tuple(sorted(found)) or (name,))


def machine_from_message(message: dict[str, Any]) -> Machine:
    """A machine from another node's JSON."""
    return Machine(message["name"], tuple(message["marks"]))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
