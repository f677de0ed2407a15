"""What a reward server holds at once, in bytes, and when a client that found it full should return."""

from __future__ import annotations

import math
import time
from collections import deque

PACE_S = 60.0
"""The pace of the queue is taken from what it has finished in this time."""
SHORTEST_S = 1
LONGEST_S = 60


class QueueFull(Exception):
    """There is no room. retry_after_s: whole seconds after which there may be some."""

    def __init__(self, retry_after_s: int):
        super().__init__(f"full: again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class ByteQueue:
    """Bytes of all requests that are being read, wait, or are being graded."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._done: deque[tuple[float, int]] = deque()

    def take(self, size: int) -> None:
        """Takes room. Raises Full where there is none; something is always taken by an empty queue."""
        if self.held_bytes and self.held_bytes + size > self.limit_bytes:
            raise QueueFull(self.retry_after_s())
        self.held_bytes += size

    def give(self, size: int, finished: bool = False) -> None:
        """Gives room back. finished: it was graded, so it counts for the pace."""
        self.held_bytes -= size
        if finished:
            self._done.append((time.monotonic(), size))

    def retry_after_s(self) -> int:
        """Half the time that what is held will take at the pace of the last minute, so that clients are back
        before the queue is empty."""
        now = time.monotonic()
        while self._done and now - self._done[0][0] > PACE_S:
            self._done.popleft()
        if not self._done:
            return SHORTEST_S
        passed_s = max(now - self._done[0][0], 1.0)
        pace = sum(size for _, size in self._done) / passed_s
        return min(max(math.ceil(self.held_bytes / pace / 2), SHORTEST_S), LONGEST_S)
