"""ZeRO-3 on one rank, which has nothing to shard: its weights and gradients are its shards, and nothing of
stage 3 runs in a pass.

DeepSpeed keeps what it lays out for a checkpoint, the flat buffers and the optimizer's step. Its hooks are
gone: they would gather, release and reduce what is whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn


def is_whole(module: nn.Module, device: torch.device) -> bool:
    """Whether this rank's shards are the whole weights of a model at stage 3, and lie on its device."""
    if dist.get_world_size() > 1:
        return False
    shards: list[Any] = [getattr(p, "ds_tensor", None) for p in module.parameters()]
    return all(shard is not None and shard.device.type == device.type for shard in shards)


def keep_weights(module: nn.Module, offload: Any) -> None:
    """Makes every parameter a view of its shard, for good. offload: DeepSpeed's hooks on the module."""
    offload._remove_module_hooks()
    offload.partition_all_parameters = _nothing
    parameters: list[Any] = list(module.parameters())
    for parameter in parameters:
        parameter.data = parameter.ds_tensor.data.view(parameter.ds_shape)
        parameter.ds_status = ZeroParamStatus.AVAILABLE


def _nothing() -> None:
    """There is nothing to release."""


class WholeGradients:
    """Adds gradients up where the optimizer's step reads them. Needs an optimizer on the GPU."""

    def __init__(self, zero: Any) -> None:
        """zero: DeepSpeed's ZeRO-3 optimizer, whose hooks and bucket for reducing go."""
        for hook in (*zero._grad_acc_hooks, *zero._leaf_module_hooks):
            hook.remove()
        for bucket in zero.ipg_buckets.values():
            bucket.buffer = None
        self._flat = zero.grad_partitions_flat_buffer
        by_id = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        self._views: list[tuple[Any, Tensor]] = []
        for parameter in (p for group in zero.fp16_groups for p in group):
            if parameter.requires_grad:
                self._views.append((parameter, by_id[parameter.ds_id].view(parameter.ds_shape)))
        self._same_type = all(view.dtype == parameter.dtype for parameter, view in self._views)
        if not self._same_type:
            for parameter, view in self._views:
                parameter.register_post_accumulate_grad_hook(partial(_add, view))

    def begin(self) -> None:
        """Before an update's first pass: all gradients are 0."""
        self._flat.zero_()
        if self._same_type:
            for parameter, view in self._views:
                parameter.grad = view

    def end(self) -> None:
        """After an update's last pass: DeepSpeed's step finds no gradient at a parameter."""
        for parameter, _ in self._views:
            parameter.grad = None


def _add(view: Tensor, parameter: Tensor) -> None:
    """A pass's gradient into the sum of another type."""
    assert parameter.grad is not None
    view.add_(parameter.grad)
    parameter.grad = None
