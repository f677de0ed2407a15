"""What vLLM does otherwise than a run needs, mended from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from functools import wraps
from typing import Any

from vllm.device_allocator import alloc_conf


def reduce_over_gloo() -> None:
    """Keeps vLLM's CPU tensor parallelism off its shared-memory segments. Under an external launcher their
    name is the same for every engine of the machine and a killed one leaves them behind, so that the next
    engine cannot start. Where ranks name it differently, vLLM uses torch.distributed instead."""
    from vllm.distributed.device_communicators import cpu_communicator

    segments: Any = cpu_communicator._CPUSHMDistributed
    segments.make_group_name = staticmethod(
        lambda communicator: f"{communicator.unique_name}-{communicator.rank}"
    )


def heed_experts_of_this_rank() -> None:
    """Has vLLM's experts on a CPU compute those that their rank holds. Its kernel takes every chosen expert
    for one of them; here another rank's experts get a share of 0, and the ranks' outputs add up."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    kernel: Any = cpu_moe.CPUUnquantizedExperts
    compute = kernel.apply
    if hasattr(compute, "__wrapped__"):
        return

    @wraps(compute)
    def of_this_rank(*args: Any, topk_ids: Any, topk_weights: Any, expert_map: Any, **others: Any) -> None:
        """topk_ids, topk_weights: chosen experts and their shares, [T, k]. expert_map [experts]: an expert's
        number on this rank, -1 if another rank holds it."""
        if expert_map is not None:
            held = expert_map[topk_ids.long()]
            topk_ids = held.clamp(min=0).to(topk_ids.dtype)
            topk_weights = topk_weights.where(held >= 0, 0.0)
        compute(*args, topk_ids=topk_ids, topk_weights=topk_weights, expert_map=expert_map, **others)

    kernel.apply = of_this_rank


@contextlib.contextmanager
def shareable_memory() -> Generator[None]:
    """Has torch take GPU memory that another process can map, without expandable segments. vLLM's all-reduce
    shares the buffers of its CUDA graphs through cudaIpcGetMemHandle, which refuses such segments, and then
    it ends the process (vLLM's issue 42609)."""
    before = alloc_conf.current_alloc_conf()
    if not alloc_conf.conf_flag_enabled(before, alloc_conf.EXPANDABLE_SEGMENTS):
        yield
        return
    alloc_conf.set_alloc_conf(alloc_conf.with_conf_flag(before, alloc_conf.EXPANDABLE_SEGMENTS, False))
    try:
        yield
    finally:
        alloc_conf.set_alloc_conf(before)


def zero_scratch(worker: Any) -> None:
    """Zeros what vLLM's model runner for GPUs made beside the weights, in the same pool, and is no buffer of
    the model: sleep level 2 gives it back unfilled, and a padded CUDA graph reads it beyond what a batch has
    filled (vLLM's RFC 53343; NeMo-RL 2631 met it)."""
    state = getattr(worker.model_runner, "model_state", None)
    rope = getattr(state, "rope_state", None)
    encoder = getattr(state, "encoder_runner", None)
    for owner, name in ((rope, "positions"), (encoder, "inputs_embeds"), (state, "inputs_embeds")):
        tensor = getattr(owner, name, None)
        if tensor is not None:
            tensor.zero_()
