"""What recipes allocated on a device that computes nothing, phase by phase: `python -m benchmarks.allocated`
runs one rank of each there at its true shape, and writes allocated.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from recipes.recipe.resolved import GIB, MemoryPlan

PATH = Path(__file__).with_suffix(".json")
NOT_THERE = ("CUDA context", "NCCL's communicators")
"""Parts of the plan that this device has not."""
SAME_GIB = 0.1
"""Two plans of one recipe that differ by less are one plan."""


@dataclass(frozen=True)
class Allocated:
    """GiB of one GPU at the peak of a phase, without the CUDA context and NCCL's buffers."""

    planned: float
    """The plan of the day on which it was allocated."""
    tensors: float
    allocated: float
    """With what torch keeps of earlier tensors and what fragments."""


def allocated_by_phase(recipe: str) -> dict[str, Allocated]:
    """By phase of the plan, where `update` holds the optimizer's step; {} of a recipe that was not run."""
    known = json.loads(PATH.read_text()) if PATH.exists() else {}
    phases = known.get(recipe, {}).get("phases", {})
    return {name: Allocated(**gib) for name, gib in phases.items()}


def planned(need: MemoryPlan) -> dict[str, float]:
    """GiB of the same phases as planned, without what this device has not."""
    found = {}
    for phase in need.phases:
        found[phase.name] = (phase.total - absent(phase.parts)) / GIB
    found["update"] = max(found["update"], found.pop("optimizer step"))
    return found


def absent(parts: dict[str, float]) -> float:
    """Bytes of a phase that this device has not."""
    return sum(parts.get(name, 0.0) for name in NOT_THERE)


def beside(recipe: str, need: MemoryPlan) -> dict[str, Allocated]:
    """What stands beside a plan, with the CUDA context and NCCL's buffers as planned; {} where the recipe is
    planned otherwise than on the day it was run, as with other GPUs or options."""
    found = allocated_by_phase(recipe)
    if not found:
        return {}
    now = planned(need)
    if not found.keys() <= now.keys():  # another machine samples, say
        return {}
    if any(abs(now[name] - one.planned) > SAME_GIB for name, one in found.items()):
        return {}
    beside = {}
    for phase in need.phases:
        if one := found.get(phase.name):
            more = absent(phase.parts) / GIB
            beside[phase.name] = Allocated(one.planned + more, one.tensors + more, one.allocated + more)
    return beside
