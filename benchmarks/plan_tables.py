"""Tables of docs/planned.md that follow from the plan alone: `python -m benchmarks.plan_tables` writes them
anew. Arithmetic, so no machine matters to it.

Seconds of each phase beside their roofline: what the same work takes where every kernel reaches what single
kernels reach (products 70% of the peak, memory 85% of its bandwidth, links all of theirs), and nothing else
takes time. And host memory of each recipe at a save, planned beside what the shards come to, tensor by
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from recipes.plan import cost, image_cost, memory
from recipes.presets import RECIPES, get
from recipes.recipe.spec import Recipe
from trainer.config.budget import trained
from trainer.hardware import adapters

DOCS = Path(__file__).parents[1] / "docs/planned.md"
GIB = 2**30
FAR = 1.5
"""A phase whose plan is more than so many times its roofline gets a reason."""
PHASES = ("rollout", "logprobs", "update", "sync")


@dataclass(frozen=True)
class Ideal:
    """A constant of the plan as a roofline has it."""

    name: str
    value: float
    reason: str
    """What the plan has it for, in a few words."""
    module: ModuleType = cost


IDEALS = (
    Ideal("ENGINE_STEP_S", 0.0, "host work of decode steps"),
    Ideal("SEQUENCE_S", 0.0, "host work of each sequence"),
    Ideal("ALL_REDUCE_S", 0.0, "latency of all-reduces"),
    Ideal("DECODE", cost.TRAFFIC, "bandwidth that decoding reaches"),
    Ideal("PREFILL", cost.PRODUCTS, "peak that prefill reaches"),
    Ideal("MATMUL", 1.0, "peak that training reaches"),
    Ideal("REACHED", 1.0, "peak that training reaches"),
    Ideal("NETWORK", 1.0, "share of the links that collectives reach"),
    Ideal("BLOCK_S", 0.0, "host work of passes"),
    Ideal("PHASE_S", 0.0, "start of phases"),
    Ideal("PIXEL_S", 0.0, "images on the host", image_cost),
    Ideal("IMAGE_S", 0.0, "images on the host", image_cost),
)


@contextmanager
def as_ideal(chosen: tuple[Ideal, ...]) -> Generator[None]:
    """Plans with these constants as a roofline has them, until the block ends."""
    before = [getattr(one.module, one.name) for one in chosen]
    try:
        for one in chosen:
            setattr(one.module, one.name, one.value)
        yield
    finally:
        for one, value in zip(chosen, before, strict=True):
            setattr(one.module, one.name, value)


def trainings() -> list[Recipe]:
    """The recipes that train on GPUs."""
    return [r for r in map(get, RECIPES) if r.kind == "train" and r.cluster.gpus_per_node]


def planned(recipe: Recipe) -> cost.StepTime:
    """The plan's seconds on the recipe's own GPUs, between nodes by 400 Gbit/s."""
    gpu = recipe.cluster.gpu
    need = memory.plan_memory(recipe, gpu)
    assert need is not None
    return cost.step_time(recipe, gpu, 400.0, need)


@dataclass(frozen=True)
class Compared:
    """A recipe's phases as the plan and as the roofline have them."""

    recipe: Recipe
    plan: cost.StepTime
    roof: cost.StepTime
    reasons: dict[str, str]
    """Why a phase is far from its roofline, by phase."""

    def row(self) -> str:
        """The recipe in the table."""
        cells = [self.recipe.name, self.recipe.cluster.gpu]
        for phase in PHASES:
            roof, plan = getattr(self.roof, phase), getattr(self.plan, phase)
            cells.append(f"{plan:.1f} / {roof:.1f}" if plan else "")
        beside = self.plan.images + self.plan.phases
        cells += [f"{beside:.1f}", f"{self.plan.total:.1f} / {self.roof.total:.1f}"]
        why = "; ".join(f"{phase}: {reason}" for phase, reason in self.reasons.items())
        return "| " + " | ".join([*cells, why]) + " |"


def compared(recipe: Recipe) -> Compared:
    """Plan and roofline of a recipe, with reasons."""
    plan = planned(recipe)
    with as_ideal(IDEALS):
        roof = planned(recipe)
    reasons = {}
    for phase in PHASES:
        before, best = getattr(plan, phase), getattr(roof, phase)
        if before > FAR * best:
            reasons[phase] = _reason(recipe, phase, before, best)
    return Compared(recipe, plan, roof, reasons)


def _reason(recipe: Recipe, phase: str, before: float, best: float) -> str:
    """The assumption that takes most of the seconds between plan and roofline, with its share of them."""
    shares: dict[str, float] = {}
    for reason in {one.reason for one in IDEALS}:
        with as_ideal(tuple(one for one in IDEALS if one.reason == reason)):
            shares[reason] = (before - getattr(planned(recipe), phase)) / (before - best)
    most = max(sorted(shares), key=lambda reason: shares[reason])
    return f"{most} ({shares[most]:.0%} of the difference)"


def power_of_two(size: int) -> int:
    """Bytes that torch's own pinned memory takes for `size`."""
    return 1 << (size - 1).bit_length()


def staged(recipe: Recipe, taken: Callable[[int], int] = int) -> float:
    """Bytes of a node's staging: of every trained tensor three fp32 parts on each rank, as the trainer cuts
    them. taken: bytes of memory for a part of so many."""
    need = memory.plan_memory(recipe)
    assert need is not None
    config, gpus = recipe.config, recipe.cluster.gpus_per_node
    world = config.placement.world_size
    lora = config.lora
    learning = replace(need.shape, vision=None) if config.model.freeze_vision else need.shape
    sizes = adapters.adapter_sizes(need.shape, lora.rank, lora.vision) if lora.rank else learning.sizes()
    on_a_rank = sum(3 * taken(4 * -(-elements // world)) for elements in sizes)
    assert sum(sizes) == trained(config, need.shape)
    return on_a_rank * (gpus if config.checkpoint.asynchronous else 1)


def memory_row(recipe: Recipe) -> str:
    """The recipe in the table of host memory."""
    need = memory.plan_memory(recipe)
    assert need is not None
    staging = need.host["checkpoint being written"]
    figures = (staging, staged(recipe), staged(recipe, power_of_two), need.host_bytes)
    asked = memory.with_resources(recipe).cluster.memory_gib
    cells = [recipe.name, *(f"{value / GIB:.1f}" for value in figures), str(asked)]
    return "| " + " | ".join(cells) + " |"


def times() -> str:
    """The table of seconds."""
    head = (
        "| recipe | GPU | rollout | logprobs | update | sync | images, phases | step | more than 1.5: why |"
    )
    return "\n".join([head, "|---" * 9 + "|", *(compared(recipe).row() for recipe in trainings())])


def hosts() -> str:
    """The table of host memory."""
    head = "| recipe | staging planned | by shards | as powers of two | all planned | asked of a machine |"
    return "\n".join([head, "|---" * 6 + "|", *map(memory_row, trainings())])


def write(page: Path, command: str, tables: dict[str, str]) -> None:
    """Writes tables into a page, each between its marks; the first names the command."""
    text = page.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- {name}: {command} -->\n", f"\n<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + table + end + rest.split(end, 1)[1]
    page.write_text(text)


def main() -> None:
    """Writes the tables between their marks."""
    write(DOCS, "python -m benchmarks.plan_tables", {"times": times(), "hosts": hosts()})


if __name__ == "__main__":
    main()
