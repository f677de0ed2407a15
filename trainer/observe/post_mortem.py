"""Ray's post-mortem debugger in a rank: a rank that raises waits for a person, and says so where its launcher
reads it.

`watch.post_mortem` sets the variables; docs/debugging.md tells how to attach.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from trainer.observe import beacon

VARIABLE = "RAY_DEBUG_POST_MORTEM"


def variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of a node whose ranks wait: with pdb over a socket of the node itself, unless RAY_DEBUG
    asks for another debugger; and without the time limits that would end the ranks which wait in a
    collective."""
    return {
        VARIABLE: "1",
        "RAY_DEBUG": env.get("RAY_DEBUG", "legacy"),
        "DEEPSPEED_TIMEOUT": str(7 * 24 * 60),  # minutes
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }


def install(handled: tuple[type[Exception], ...]) -> None:
    """In a rank's process. handled: exceptions that the driver deals with; nobody is called for those."""
    if os.environ.get(VARIABLE) != "1":
        return
    rpdb: Any = importlib.import_module("ray.util.rpdb")
    wait = rpdb._post_mortem

    def told() -> None:
        error = sys.exc_info()[1]
        if error is None or isinstance(error, handled):
            return
        beacon.pause(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}")
        try:
            wait()
        finally:
            beacon.pause("")

    rpdb._post_mortem = told
