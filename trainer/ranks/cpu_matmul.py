"""Float32 matrix products of the CPU ranks by oneDNN.

torch gives them to MKL, which runs at half of oneDNN's speed on AMD's processors
(benchmarks/cpu_matmul.json), and has no switch. The dispatcher's kernel is overridden, so that forward and
backward passes of all layers use it. Equal shapes still give equal bits.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

SMALLEST = 64**3
"""Multiplications below which the call costs more than it saves."""


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """[m, k] @ [k, n]."""
    m, k = a.shape
    if a.dtype is not torch.float32 or b.dtype is not torch.float32 or m * k * b.shape[1] < SMALLEST:
        return torch.addmm(a.new_zeros(()), a, b, beta=0)  # torch's own kernel under its other name
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


def install_matmul() -> torch.library.Library | None:
    """Overrides `aten::mm` on CPU for as long as the returned library is held; None where this torch has no
    oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # says that a kernel is overridden
        library.impl("mm", matmul, "CPU")
    return library
