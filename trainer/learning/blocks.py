"""A model's blocks: its decoder's layers and its vision tower's. A pass gathers, recomputes and reduces whole
blocks, so that Python runs a few times a block and not at every module of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.hardware.architectures import FAMILIES


def blocks_of(model: Any) -> list[nn.Module]:
    """The blocks of a model of `FAMILIES`. Raises LookupError where it lacks a class that its family names:
    ZeRO-3 would gather its modules one by one."""
    names = FAMILIES[model.config.model_type].blocks
    modules = [module for module in model.modules() if type(module).__name__ in names]
    missing = set(names) - {type(block).__name__ for block in modules}
    if missing:
        raise LookupError(f"{type(model).__name__} has no {', '.join(sorted(missing))}")
    return modules


def recompute(blocks: list[nn.Module], random: bool) -> None:
    """Makes the backward pass compute each block's activations again from its input. random: whether a block
    draws random numbers, which are then drawn alike.

    ZeRO-3's hooks stay outside of what is computed again: it gathers a block once forward and once backward.
    transformers' own checkpoints enclose them, and a block would be gathered, released and gathered again.
    """
    for block in blocks:
        block.forward = partial(_recomputed, block.forward, random)


def _recomputed(forward: Callable[..., Any], random: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=random, **kwargs)


def begin_gradients(blocks: list[nn.Module]) -> None:
    """Lets every trained block's input have a gradient. Where what comes before a block is frozen, it has
    none, and the hook behind the block's backward pass would run before the block's gradients are there."""
    for block in blocks:
        block.register_forward_pre_hook(_with_gradient)


def _with_gradient(_block: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Any, ...] | None:
    hidden, *others = inputs
    if hidden.requires_grad or not torch.is_grad_enabled():
        return None
    return (hidden.detach().requires_grad_(), *others)


class _Linear(torch.autograd.Function):
    """torch's linear layer, of which autograd keeps the parameter and not a view of it, which would keep the
    weights that ZeRO-3 has gathered in memory until the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """inputs [..., n], weight [m, n], bias [m] -> [..., m]."""
        ctx.save_for_backward(inputs, weight)
        return nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # ty: ignore[incompatible-method-override]
        """[..., m] -> the gradients of inputs, weight and bias."""
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        grad_inputs = grad @ weight if needs_inputs else None
        grad_weight = rows.t() @ inputs.flatten(0, -2) if needs_weight else None
        return grad_inputs, grad_weight, rows.sum(0) if needs_bias else None


def keep_no_gathered_weights(model: nn.Module, recomputed: list[nn.Module]) -> None:
    """Lets autograd keep no gathered weight of a linear layer from its forward to its backward pass. In the
    blocks that are `recomputed` it keeps none anyway."""
    exempt = {id(module) for block in recomputed for module in block.modules()}
    modules: list[Any] = list(model.modules())
    for module in modules:
        if type(module) is nn.Linear and id(module) not in exempt:
            module.forward = partial(_linear, module)


def _linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    return _Linear.apply(inputs, module.weight, module.bias)
