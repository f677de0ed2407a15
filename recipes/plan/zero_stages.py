"""ZeRO stages 1, 2, 3 and 3 with hpZ side by side for one recipe: what fits, and seconds per step with their
terms."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.capabilities import CAPABILITIES
from recipes.plan import cost, memory, passes
from recipes.plan.exchange import UpdateTime, update_time
from recipes.recipe.spec import Recipe, override, validate
from trainer.config import ConfigError
from trainer.hardware.gpus import gpu_named
from trainer.hardware.model_shapes import Shape

SLOW_GBIT_S = 100.0
"""Between nodes: below this ZeRO-3, which sends the weights in every pass, is warned about."""


@dataclass(frozen=True)
class ZeroStage:
    """A recipe at one stage, on its own GPU."""

    name: str
    changes: tuple[str, ...]
    """What `--set` makes of the recipe."""
    peak_bytes: float
    fits: bool
    passes: int
    """Passes of one step."""
    time: UpdateTime
    ours: bool
    """Whether it is the recipe's own."""


def network_of(recipe: Recipe, target: str | None) -> float:
    """Gbit/s between nodes that the target is taken to have; 100 where that is not said."""
    can = CAPABILITIES.get(target or "")
    if not can or recipe.cluster.nodes == 1:  # one pod has no network to others
        return 100.0
    return can.network_gbit_s.get(recipe.cluster.gpu, can.network_gbit_s[""]) or 100.0


def compare_stages(recipe: Recipe, network_gbit_s: float) -> list[ZeroStage]:
    """Every stage that the recipe's method can use; empty where there is no GPU plan. hpZ keeps a copy per
    node."""
    own = recipe.config.optimizer
    cluster = recipe.cluster
    found = []
    variants = [("1", 1, 1), ("2", 2, 1), ("3", 3, 1)]
    if cluster.nodes > 1 and cluster.gpus_per_node > 1:
        variants.append((f"3, hpZ {cluster.gpus_per_node}", 3, cluster.gpus_per_node))
    for name, stage, ranks in variants:
        changes = (f"optimizer.zero_stage={stage}", f"optimizer.hpz_ranks={ranks}")
        try:
            changed = override(recipe, list(changes))
            validate(changed)
        except ConfigError:  # grpo needs stage 3
            continue
        changed = memory.with_rows(changed)
        need = memory.plan_memory(changed)
        if need is None:
            return []
        step = passes.of_step(changed, need.shape)
        time = _updates(changed, need.shape, step, network_gbit_s)
        ours = (own.zero_stage, own.hpz_ranks) == (stage, ranks)
        found.append(ZeroStage(name, changes, need.peak.total, need.fits, len(step.updates), time, ours))
    return found


def _updates(recipe: Recipe, shape: Shape, step: passes.Passes, network_gbit_s: float) -> UpdateTime:
    """Seconds of a step's updates on the recipe's GPU."""
    card = gpu_named(recipe.cluster.gpu)
    gather = cost.gather_seconds(recipe, shape, card, network_gbit_s)
    within = cost.gather_seconds(recipe, shape, card, network_gbit_s, hpz=True)
    token = cost.token_seconds(shape, card)
    host = cost.host_seconds(recipe.config, shape)
    unpack = cost.unpack_seconds(recipe.config, shape, card)
    return update_time(recipe.config, shape, step.updates, token, gather, within, host, unpack)


def stage_advice(recipe: Recipe, stages: list[ZeroStage], network_gbit_s: float) -> str:
    """A warning for ZeRO-3 over a slow network, and the fastest stage that fits where it is another; or
    ""."""
    fitting = [stage for stage in stages if stage.fits]
    own = next((stage for stage in stages if stage.ours), None)
    if not fitting or own is None:
        return ""
    best = min(fitting, key=lambda stage: stage.time.total)
    change = "" if best is own else f": --set {' --set '.join(best.changes)} takes {best.time.total:.1f} s"
    slow = recipe.cluster.nodes > 1 and own.name.startswith("3") and network_gbit_s < SLOW_GBIT_S
    if slow:
        return (
            f"warning: ZeRO-3 gathers the weights in each of {own.passes} passes over {network_gbit_s:g} Gb/s"
            f" between nodes, under {SLOW_GBIT_S:g}{change or '; no other stage fits'}"
        )
    much_faster = best.time.total < 0.9 * own.time.total
    return f"ZeRO-{best.name} is faster by this model{change}" if much_faster else ""
