"""Gives back to the kernel the pages that freed tensors leave between living ones in the C library's heap.

Passes differ in length, so what one frees seldom fits the next: in forty updates of real lengths holes grew
to 0.9 GB.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

SLACK_BYTES = 32 << 20
"""Growth of the process after which the heap is trimmed again. Trimming more often would cost time: the
kernel zeroes every page that is used again."""
ARENAS = 2
"""Number of heaps that a process may have (`rank_environment`). By default the C library gives
threads heaps of their own, up to eight per core, and each of them has holes."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


class Heap:
    """The heap of this process."""

    def __init__(self) -> None:
        self._least = 0
        self._library = ctypes.CDLL(None)

    def trim(self) -> bool:
        """Trims the heap if the process has grown by SLACK_BYTES since the last time. Returns whether it
        did."""
        if resident_bytes() < self._least + SLACK_BYTES:
            return False
        self._library.malloc_trim(0)
        self._least = resident_bytes()
        return True
