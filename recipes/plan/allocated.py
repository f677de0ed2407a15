"""What recipes allocated on a device that computes nothing, phase by phase: `python -m benchmarks.allocated`
runs one rank of each there at its true shape, and writes allocated.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Allocated:
    """GiB of one GPU at the peak of a phase, without the CUDA context and NCCL's buffers."""

    planned: float
    """The plan of the day on which it was allocated."""
    tensors: float
    allocated: float
    """With what torch keeps of earlier tensors and what fragments."""


def allocated(recipe: str) -> dict[str, Allocated]:
    """By phase of the plan, where `update` holds the optimizer's step; {} of a recipe that was not run."""
    known = json.loads(PATH.read_text()) if PATH.exists() else {}
    phases = known.get(recipe, {}).get("phases", {})
    return {name: Allocated(**gib) for name, gib in phases.items()}
