"""Host memory of a job: its own processes', whatever a neighbor on the machine takes."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

HELD = re.compile(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
"""Memory that cannot be dropped, what processes share divided among them: without mapped files."""


def children_bytes() -> int:
    """Bytes that all processes hold that this one has started, and theirs."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            held = HELD.findall(Path(f"/proc/{process.pid}/smaps_rollup").read_text())
        except OSError:  # it has ended
            continue
        total += sum(map(int, held)) << 10
    return total
