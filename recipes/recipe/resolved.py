"""A recipe as it runs on one target. `recipes.plan.resolving` makes it once; what shows, renders, prices or
starts it takes it, and asks nothing again."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.recipe.spec import Recipe
from trainer.hardware.model_shapes import Shape

GIB = 2**30


@dataclass(frozen=True)
class Phase:
    """Peak of one phase on one GPU, by what it is made of; bytes."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    shape: Shape
    gpu: str
    gpu_bytes: float
    phases: list[Phase]
    kv_cache_tokens: int
    """Tokens that one engine's KV cache holds: a rank's engine, else one of the run's own workers."""
    host: dict[str, float]
    shm_bytes: float
    disk: dict[str, float]
    checkpoint_bytes: float
    """One whole checkpoint, all ranks."""

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether every phase fits, and the KV cache takes at least one longest sequence."""
        return self.problem == ""

    @property
    def problem(self) -> str:
        """Why it does not fit; empty if it does."""
        if any(phase.name.endswith("rollout") for phase in self.phases) and self.kv_cache_tokens <= 0:
            return "the engine's share of memory leaves nothing for the KV cache"
        if self.peak.total > self.gpu_bytes:
            return f"{self.peak.name} needs {self.peak.total / GIB:.1f} GiB of {self.gpu_bytes / GIB:.1f} GiB"
        return ""

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())

    @property
    def disk_bytes(self) -> float:
        return sum(self.disk.values())


@dataclass(frozen=True)
class MachineChoice:
    """One kind of machine that a target may be asked for."""

    target: str
    """The target that has it: one of its own clouds, where a target chooses among several."""
    gpu: str
    """Our name of its GPUs; "" for machines without."""
    spot: bool
    """Whether it is asked for as preemptible."""
    usd: float | None
    """Expected dollars of the run there by the price snapshot, or of a node and hour where nothing is
    trained: machines are tried in their order. None: no price is known, or it is short of memory."""
    listed_usd: float = 0.0
    """Dollars per hour of one of its GPUs on demand, by the price snapshot; 0: not known."""


@dataclass(frozen=True)
class Expectation:
    """What a run is expected to take and to cost, under the names that its record has; 0 where no price is
    known."""

    usd_per_hour: float = 0.0
    """All nodes."""
    planned_usd: float = 0.0
    planned_hours: float = 0.0
    planned_most_usd: float = 0.0
    """What nine in ten such runs stay below."""
    planned_most_hours: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe:
    """One group of machines of a recipe on its target."""

    recipe: Recipe
    """With rows, RAM, disk and shared memory written out, whichever it left open."""
    target: str
    memory: MemoryPlan | None
    """On the recipe's own GPU; None without GPUs or without a model to speak of."""
    machines: tuple[MachineChoice, ...]
    """All that the target may be asked for, in the order in which they are tried."""
    sampling: ResolvedRecipe | None = None
    """The second group, on its own target."""

    @property
    def groups(self) -> tuple[ResolvedRecipe, ...]:
        """The run's own machines, then those that sample for it."""
        return (self, self.sampling) if self.sampling else (self,)
