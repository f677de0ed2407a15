"""DeepSpeed's ZeRO as this trainer sets it up: its configuration, a count of gathers, and limits to its
logging and to what it patches in torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn

from trainer.config import ConfigError, RunConfig, budget
from trainer.config.budget import SUB_GROUP, prefetch_parameters
from trainer.hardware.model_shapes import Shape
from trainer.learning.zero import private_names

FUNCTIONAL: Any = nn.functional
LINEAR = FUNCTIONAL.linear
"""torch's own. `zero.Init` puts another in its place for good, and vLLM would call that too."""


def exact_frequencies(model: Any) -> None:
    """Computes rotary frequencies in fp32 again: `zero.Init` rounds what a model's constructors make to its
    own type. In bf16 that is a radian off at position 1,000
    (github.com/deepspeedai/DeepSpeed/issues/4932)."""
    for module in model.modules():
        has_frequencies = isinstance(getattr(module, "inv_freq", None), Tensor)
        if has_frequencies:
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.float())
            model._init_weights(module)


def gather_whole(blocks: list[torch.nn.Module]) -> None:
    """Lets ZeRO-3 gather a block's weights at once and reduce their gradients together: one pair of hooks for
    a block, not for each of its modules; experts among them on every rank alike, whatever a router
    chooses."""
    for block in blocks:
        set_z3_leaf_module(block, True)


class GatherCounts:
    """Counts how often the passes of this process gather weights, and how many bytes."""

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0

    def count(self, gathered: Tensor) -> None:
        """One gather more."""
        self.calls += 1
        self.bytes += gathered.nbytes


GATHERS = GatherCounts()
private_names.count_gathers(GATHERS.count)
private_names.use_one_optimizer()


def gathers_blocks(config: RunConfig, inference: bool = False) -> bool:
    """Whether the trainer gathers the weights of a model, instead of DeepSpeed."""
    return budget.takes_blocks(config, inference) and not private_names.LACKING


def zero_config(config: RunConfig, shape: Shape, inference: bool = False) -> dict[str, Any]:
    """DeepSpeed's configuration: the ZeRO stage, our gradient accumulation, our optimizer."""
    o = config.optimizer
    on_gpu = config.placement.device == "cuda"
    offload = {"device": "cpu", "pin_memory": on_gpu}
    zero: dict[str, Any] = {"stage": o.zero_stage, "overlap_comm": on_gpu}
    if o.zero_stage == 3:
        ours = gathers_blocks(config, inference)
        live = o.live_parameters // 2 if ours else o.live_parameters
        zero |= {
            "sub_group_size": SUB_GROUP,
            "reduce_bucket_size": budget.reduce_bucket(config) if ours else budget.REDUCE_BUCKET,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
            # Ahead of the modules between the blocks it would gather the head, for the whole pass.
            "stage3_prefetch_bucket_size": 0 if ours else prefetch_parameters(config, shape),
        }
    if inference and o.offload_reference:
        zero["offload_param"] = offload
    if not inference and o.offload_optimizer:
        zero["offload_optimizer"] = offload
    if not inference and o.hpz_ranks > 1:
        zero["zero_hpz_partition_size"] = o.hpz_ranks
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # a packed row
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": config.model.dtype == "bf16"},
        "steps_per_print": 10**9,
        # Its clock would wait for the GPU at the start and the end of every pass.
        "timers": {"throughput": {"enabled": False}},
    }
    if not inference:
        if config.model.dtype == "bf16":
            out["data_types"] = {"grad_accum_dtype": o.grad_accum_dtype}
        out |= {"gradient_clipping": o.max_grad_norm, "zero_force_ds_cpu_optimizer": False}
    return out


def initialize_quietly(initialize: Callable[..., Any], **kwargs: Any) -> Any:
    """Lets DeepSpeed log warnings and errors only. It logs some hundred lines per model otherwise."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        return initialize(**kwargs)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the policy does not fit this GPU: use more GPUs, a smaller model, optimizer.zero_stage=3, or "
            "optimizer.offload_optimizer=true"
        ) from error
    finally:
        logger.setLevel(level)
