"""Ray's post-mortem debugger in a rank: a rank that raises waits for a person, and its launcher learns of it.

`watch.post_mortem` sets the variables; docs/failures.md says how to attach.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from trainer.observe import beacon

VARIABLE = "RAY_DEBUG_POST_MORTEM"


def debugger_variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of a node whose ranks wait for a debugger.

    The debugger is pdb over a socket of the node itself, unless RAY_DEBUG asks for another one. The
    time limits that would end ranks in a collective are lifted.
    """
    return {
        VARIABLE: "1",
        "RAY_DEBUG": env.get("RAY_DEBUG", "legacy"),
        "DEEPSPEED_TIMEOUT": str(7 * 24 * 60),  # minutes
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }


def install_debugger(handled: tuple[type[Exception], ...]) -> None:
    """Installs the debugger in a rank's process.

    Exceptions in `handled` are the driver's; no rank waits for those.
    """
    if os.environ.get(VARIABLE) != "1":
        return
    rpdb: Any = importlib.import_module("ray.util.rpdb")
    wait = rpdb._post_mortem

    def wait_for_a_person() -> None:
        error = sys.exc_info()[1]
        if error is None or isinstance(error, handled):
            return
        lines = str(error).strip().splitlines() or [""]
        beacon.note_pause(f"{type(error).__name__}: {lines[0][:200]}")
        try:
            wait()
        finally:
            beacon.note_pause("")

    rpdb._post_mortem = wait_for_a_person
