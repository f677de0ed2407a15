"""Times of the parts of a start, from the launcher's first line to the first step: the cost of a
preemption."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

STARTED_VARIABLE = "SPOTRL_STARTED"
"""Variable that gives the driver the time (unix, s) at which the launcher began this attempt."""
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
        """Starts at the launcher's time, or now without a launcher."""
        self._began = self._last = float(env.get(STARTED_VARIABLE) or time.time())
        self.parts: dict[str, float] = {}
        self.told = False

    def mark(self, part: str) -> None:
        """Ends `part`, one of PARTS."""
        now = time.time()
        self.parts[part] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Seconds of the whole start and of every part."""
        seconds = {"perf/start_s": self._last - self._began}
        for part, of_part in self.parts.items():
            seconds[PARTS[part]] = of_part
        return seconds

    def tell(self) -> str:
        """The seconds as a line for the log."""
        self.told = True
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())
        return f"ready {self._last - self._began:.1f} s after the launch: {parts}"
