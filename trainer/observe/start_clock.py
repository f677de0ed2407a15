"""What a start takes, part by part, from the launcher's first line to the first step: what a preemption
costs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

STARTED_VARIABLE = "SPOTRL_STARTED"
"""Carries the time (unix, s) at which the launcher began this attempt to the driver."""
PARTS = {
    "launch": "perf/start_launch_s",
    "place": "perf/start_place_s",
    "load": "perf/start_load_s",
    "resume": "perf/start_resume_s",
    "sync": "perf/start_sync_s",
}


class StartClock:
    """Marks the parts of one start, in order."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        """Without a launcher the clock starts here."""
        self._began = self._last = float(env.get(STARTED_VARIABLE) or time.time())
        self.parts: dict[str, float] = {}
        self.told = False

    def mark(self, part: str) -> None:
        """Says that `part`, of PARTS, ends here."""
        now = time.time()
        self.parts[part], self._last = now - self._last, now

    def metrics(self) -> dict[str, float]:
        """The whole, and every part."""
        return {"perf/start_s": self._last - self._began} | {PARTS[part]: s for part, s in self.parts.items()}

    def tell(self) -> str:
        """The same as a line for the log."""
        self.told = True
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())
        return f"ready {self._last - self._began:.1f} s after the launch: {parts}"
