"""How tests wait for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Waits until something is so. Raises AssertionError after the timeout."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {timeout_s:g} s"
        time.sleep(0.01)
