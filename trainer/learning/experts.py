"""Mixtures of experts over packed rows: each matrix of all experts of a layer is one grouped product of
torch's, on CPUs and GPUs.

Registered with transformers as an implementation of its experts. The router stays the library's own: its
softmax in fp32, and no auxiliary loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "packed_grouped"


def use_grouped_experts(model: Any) -> None:
    """Makes a model's experts, if it has any, compute this way."""
    if any(hasattr(module, "experts") for module in model.modules()):
        model.config._experts_implementation = NAME


class DealtTokens(torch.autograd.Function):
    """Tokens [T, H] -> rows [T k, H]: each token once for each of its k experts, sorted by expert. The
    backward pass adds up a token's rows in a fixed order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, places: Tensor, active: int) -> Tensor:
        """order [T k]: row i computes choice order[i], counted token by token. places [T k]: the inverse of
        `order`. active: k."""
        ctx.save_for_backward(places)
        ctx.active = active
        return tokens.index_select(0, order // active)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # ty: ignore[incompatible-method-override]
        """[T k, H] -> [T, H]."""
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places).unflatten(0, (-1, ctx.active)).sum(1), None, None, None


class GroupedProduct(torch.autograd.Function):
    """rows [n, inputs] sorted by expert, weight [E, outputs, inputs], ends [E] -> [n, outputs]; the rows of
    expert e end before ends[e].

    The parameter itself is saved for the backward pass: torch's own product would save a view of it, which
    keeps the weights that ZeRO-3 has gathered in memory.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """ends: int32."""
        ctx.save_for_backward(rows, weight, ends)
        return grouped_mm(rows, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # ty: ignore[incompatible-method-override]
        """[n, outputs] -> the gradients of rows and weight; an expert without rows gets zeros."""
        rows, weight, ends = ctx.saved_tensors
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        grad = grad.contiguous()
        grad_rows = grouped_mm(grad, weight, offs=ends) if needs_rows else None
        grad_weight = grouped_mm(grad.t(), rows, offs=ends) if needs_weight else None
        if grad_weight is not None:  # torch leaves what it finds there on some GPUs (pytorch 172439)
            grad_weight.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
        return grad_rows, grad_weight, None


def experts(module: nn.Module, tokens: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """tokens [T, H], chosen experts [T, k] and their shares [T, k] -> [T, H]. As transformers calls it."""
    layer: Any = module
    active = chosen.shape[1]
    expert_of_row, order = chosen.flatten().sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    numbers = torch.arange(layer.num_experts, device=order.device)
    ends = torch.searchsorted(expert_of_row, numbers, right=True, out_int32=True)

    # No name for what stands between these products: without gradients each is freed as soon as it is read.
    rows = _gated(
        layer.act_fn,
        GroupedProduct.apply(DealtTokens.apply(tokens, order, places, active), layer.gate_up_proj, ends),
    )
    out = GroupedProduct.apply(rows, layer.down_proj, ends).index_select(0, places).unflatten(0, (-1, active))
    return (out * shares[..., None]).sum(1)


def _gated(activation: Callable[[Tensor], Tensor], both: Tensor) -> Tensor:
    """[n, 2 I], gate and up -> [n, I]."""
    gate, up = both.chunk(2, dim=-1)
    return activation(gate) * up


ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
