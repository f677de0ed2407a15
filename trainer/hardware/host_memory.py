"""Host memory: what is free, and what one rank takes before any model, the one figure of plan, precheck and
preflight."""

from __future__ import annotations

import re
from pathlib import Path

GIB = 1 << 30
WORKER_BYTES = {"cuda": 6 * GIB, "cpu": int(1.6 * GIB)}
"""By `placement.device`. cpu: torch, vLLM and DeepSpeed loaded, with a model of no size (measured). cuda: the
same with a CUDA context and pinned buffers (planning figure)."""


def worker_bytes(device: str, image_cache_gib: float) -> int:
    """Host memory of one rank before any model: the process, its image cache, the engine's images in
    flight."""
    return WORKER_BYTES[device] + int(2 * image_cache_gib * GIB)


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may still take: the machine's, or the container's if that is less."""
    kib = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    machine = int(kib[1]) << 10 if kib else 0
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return machine
    return machine if limit == "max" else min(machine, int(limit) - used + _droppable(cgroup))


def _droppable(cgroup: Path) -> int:
    """Bytes of file pages that count as used and that the kernel drops when memory is asked for."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
