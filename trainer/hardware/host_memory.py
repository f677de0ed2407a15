"""Host memory: what is free, and what one rank takes before any model, the one figure of plan, precheck and
preflight."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.hardware import cgroups

GIB = 1 << 30
WORKER_BYTES = {"cuda": 6 * GIB, "cpu": int(1.6 * GIB)}
"""By `placement.device`. cpu: torch, vLLM and DeepSpeed loaded, with a model of no size (measured). cuda: the
same with a CUDA context and pinned buffers (planning figure)."""


def worker_bytes(device: str, image_cache_gib: float) -> int:
    """Host memory of one rank before any model: the process, its image cache, the engine's images in
    flight."""
    return WORKER_BYTES[device] + int(2 * image_cache_gib * GIB)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may still take: the machine's, or its control groups' if that is
    less."""
    kib = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    machine = int(kib[1]) << 10 if kib else 0
    left = cgroups.memory_left(root)
    return machine if left is None else min(machine, left)
