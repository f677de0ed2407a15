"""Joins a Ray cluster, or starts one on this machine, in several attempts."""

from __future__ import annotations

import os
import sys
from typing import Any

from trainer.node.launch import ray_leftovers
from trainer.system.backoff import Backoff
from trainer.system.errors import RayError

STARTS = Backoff(attempts=3, first_wait_s=5.0)


def connect_to_ray(**options: Any) -> None:
    """`ray.init(**options)`. A Ray that this starts ends with this process, however that ends. Raises
    RayError."""
    import ray

    def start() -> None:
        try:
            ray.init(**options)
        except Exception:  # Ray raises a bare Exception where the start takes longer than its 30 s
            ray.shutdown()
            raise

    def told(error: Exception, failures: int, wait_s: float) -> None:
        again = f"attempt {failures + 1} of {STARTS.attempts}"
        print(f"Ray did not start ({_first(error)}): {again}", file=sys.stderr, flush=True)

    try:
        STARTS.call(start, lambda error: True, told)
    except Exception as error:
        raise RayError(f"Ray did not start in {STARTS.attempts} attempts ({_first(error)})") from None
    if not os.environ.get("RAY_ADDRESS"):
        ray_leftovers.end_with_this_process()


def _first(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
