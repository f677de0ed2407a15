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

from trainer.system.errors import ConfigError

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
    expert e end before ends[e]. The parameter itself is saved for the backward pass: torch's own product
    would save a view of it, which keeps the weights that ZeRO-3 has gathered in memory."""

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


COUNTS = (0, 0, 70, 0, 1, 0, 513, 0), (0,) * 7 + (1,), (0,) * 8
"""Rows of each expert in the groups that are compared: empty ones first, between and last; one row; none."""
BOUND = 0.02
"""Largest difference as a share of the loop's result in fp32; bf16 rounds by 0.004."""
NAMES = "output", "gradient of the rows", "gradient of the weights"


def check_grouped_products(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Compares at the sizes of a model's first experts; a model without any passes. Raises ConfigError."""
    layers = (module for module in model.modules() if hasattr(module, "gate_up_proj"))
    sizes = next((_sizes(layer) for layer in layers), None)
    if sizes is None:
        return
    for inputs, outputs in sizes:
        for counts in COUNTS:
            if wrong := grouped_product_fault(inputs, outputs, counts, device, dtype):
                raise ConfigError(
                    f"torch's grouped products are wrong on this GPU ({device}, torch {torch.__version__}):"
                    f" {wrong} with {counts.count(0)} of {len(counts)} experts without a row: take another"
                    " kind of GPU"
                )


def _sizes(layer: Any) -> list[tuple[int, int]]:
    """(inputs, outputs) of a layer's two products; its parameters may be sharded, so that they are empty."""
    hidden, inner = layer.hidden_dim, layer.intermediate_dim
    return [(hidden, 2 * inner), (inner, hidden)]


def grouped_product_fault(
    inputs: int, outputs: int, counts: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> str:
    """What a grouped product computes wrongly, in words; "" if nothing. counts: rows of each expert."""
    generator = torch.Generator().manual_seed(0)
    total = sum(counts)
    ends = torch.tensor(counts).cumsum(0).to(device, torch.int32)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    low = [
        drawn(total, inputs).requires_grad_(),
        (0.02 * drawn(len(counts), outputs, inputs)).requires_grad_(),
    ]
    full = [tensor.detach().float().requires_grad_() for tensor in low]
    weights = drawn(total, outputs)

    # What the allocator hands out next has held NaN.
    for size in ((total, outputs), (total, inputs), (len(counts), outputs, inputs)):
        torch.full(size, float("nan"), device=device, dtype=dtype)
    ours = _with_gradients(GroupedProduct.apply(*low, ends), low, weights)
    theirs = _with_gradients(_loop(*full, counts), full, weights.float())
    for name, computed, right in zip(NAMES, ours, theirs, strict=True):
        off = float((computed.float() - right).norm())
        if not off <= BOUND * float(right.norm()):  # NaN too
            return f"the {name} is off by {off:.2g} where the loop's norm is {float(right.norm()):.2g}"
    return ""


def _loop(rows: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
    """The same, expert by expert."""
    parts = rows.split(counts)
    return torch.cat([part @ matrix.T for part, matrix in zip(parts, weight, strict=True)])


def _with_gradients(out: Tensor, tensors: list[Tensor], weights: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]
