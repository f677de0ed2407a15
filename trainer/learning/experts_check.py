"""Grouped products of a mixture of experts, compared with a loop on the GPU that is to train.

Most experts of a short row have no row of their own. torch's grouped product was reported to hang in the
backward pass then (pytorch 152668, H100), to leave garbage where zeros belong (172439, B200) and to give NaN
(193633, B300). So before a run trains, each rank compares what it computes, forward and backward, in memory
that held NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.learning.experts import GroupedProduct
from trainer.system.errors import ConfigError

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
    for name, mine, right in zip(NAMES, ours, theirs, strict=True):
        off = float((mine.float() - right).norm())
        if not off <= BOUND * float(right.norm()):  # NaN too
            return f"the {name} is off by {off:.2g} where the loop's norm is {float(right.norm()):.2g}"
    return ""


def _loop(rows: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
    """The same, expert by expert."""
    parts = rows.split(counts)
    return torch.cat([part @ matrix.T for part, matrix in zip(parts, weight, strict=True)])


def _with_gradients(out: Tensor, tensors: list[Tensor], weights: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]
