"""Rollout workers on machines of their own (trainer/fleet)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.ranges import ranged_field

WORKER_GPU_SHARE = 0.9
"""Share of a GPU's memory for an engine that has the card to itself."""
SHARED_BY = "SPOTRL_PROCESSES_ON_NODE"
"""Variable for a rollout worker: the processes with a GPU that share its node's cores, its own among them."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Rollout workers outside the trainer's cluster, fed through the bucket alone (docs/fleet.md)."""

    workers: Literal["off", "only"] = "off"
    """off: the trainer's GPUs sample. only: workers sample everything, and the trainer builds no engine."""
    gpus_per_node: int = ranged_field(0, least=0)
    """GPUs of each of the run's own nodes that sample for it while the others learn (processes, on CPU). 0:
    none; workers are on other machines alone."""
    run: str = ""
    """Id of the run that a rollout worker samples for, in the bucket `checkpoint.remote`; for workers
    only."""
    unit_prompts: int = ranged_field(0, least=0)
    """Prompts that a worker is given at a time, with all their completions; 0: as many as a step has. On a
    GPU the engine's batch is a part of what a sample depends on, so a run keeps this number."""
    lost_s: float = ranged_field(30.0, above=5)
    """A worker that was silent for this long is lost: others get what it had not sent."""
    wait_s: float = ranged_field(600.0, above=0)
    """The trainer ends, to be started again, when it has waited this long without any worker."""
    idle_s: float = ranged_field(900.0, above=0)
    """A worker ends itself when the trainer, or its launcher while it starts, was silent for this long, so
    that no machine outlives its run."""
