"""What the ranks send each other in an update at each ZeRO stage, and how long the update takes: pure
arithmetic.

Of P weights and T trained ones, per optimizer step of n passes (a gather is everybody's all-gather of P):

    stage 1   gradients all-reduced in the last pass; afterwards the trained weights are gathered
    stage 2   gradients all-reduced in every pass; afterwards the trained weights are gathered
    stage 3   in every pass weights gathered, forward and again backward, and gradients reduce-scattered

DeepSpeed's stages 1 and 2 all-reduce buckets (use_multi_rank_bucket_allreduce), which sends twice what a
reduce-scatter does. Only the gather after the step waits; the rest runs beside the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipes.plan.passes import backward_gathers
from recipes.platforms.targets import TARGETS
from recipes.recipe.spec import Recipe
from trainer.config import RunConfig
from trainer.config.budget import trained
from trainer.hardware.model_shapes import Shape


def network_of(recipe: Recipe, target: str | None) -> float:
    """Gbit/s between nodes that the target is taken to have; 100 where that is not said."""
    can = TARGETS.get(target or "")
    if not can or recipe.cluster.nodes == 1:  # one pod has no network to others
        return 100.0
    return can.network_gbit_s.get(recipe.cluster.gpu, can.network_gbit_s[""]) or 100.0


@dataclass(frozen=True)
class UpdateTime:
    """Seconds of one optimizer step, and its terms."""

    compute: float
    """Matrix products of all passes, and unpacking of 4-bit weights."""
    wire: float
    """Collectives beside them."""
    host: float
    """The host's work beside both."""
    waited: float
    """Seconds of all passes, each as long as the longest of the three."""
    after: float
    """Gather of the updated weights."""

    @property
    def total(self) -> float:
        return self.waited + self.after


def update_time(
    config: RunConfig,
    shape: Shape,
    costs: Sequence[float],
    token_s: float,
    gather_s: float,
    within_s: float,
    host_s: float,
    unpack_s: float = 0.0,
) -> UpdateTime:
    """costs: of each pass, in tokens' worth of matrix products. token_s: forward seconds of one. gather_s:
    until every rank has seen all weights; within_s: the same in the backward pass, which hpZ keeps inside the
    node. host_s: for which a pass keeps the host busy. unpack_s: unpacking of 4-bit weights in a pass.
    """
    stage, reduced = config.optimizer.zero_stage, gather_s * trained(config, shape) / shape.parameters
    # Weights that are not trained need no gradients.
    flops = 3 + config.model.gradient_checkpointing - bool(config.lora.rank)
    compute = [flops * cost * token_s + unpack_s for cost in costs]
    match stage:
        case 3:
            wire = [gather_s + backward_gathers(config, shape) * within_s + reduced] * len(costs)
        case 2:
            wire = [2 * reduced] * len(costs)
        case _:
            wire = [0.0] * (len(costs) - 1) + [2 * reduced]
    host = [host_s] * len(costs)
    waited = sum(map(max, compute, wire, host))
    return UpdateTime(sum(compute), sum(wire), sum(host), waited, reduced if stage < 3 else 0.0)
