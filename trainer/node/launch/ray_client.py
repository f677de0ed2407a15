"""Joins a Ray cluster, or starts one on this machine, in several attempts."""

from __future__ import annotations

import sys
import time
from typing import Any

from trainer.errors import RayError

ATTEMPTS = 3
PAUSE_S = 5.0
"""Before the second attempt; twice as long before the third."""


def connect(**options: Any) -> None:
    """`ray.init(**options)`. Raises RayError."""
    import ray

    for attempt in range(1, ATTEMPTS + 1):
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray raises a bare Exception where the start takes longer than its 30 s
            ray.shutdown()
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if attempt == ATTEMPTS:
                raise RayError(f"Ray did not start in {attempt} attempts ({said})") from None
            print(
                f"Ray did not start ({said}): attempt {attempt + 1} of {ATTEMPTS}",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(PAUSE_S * attempt)
