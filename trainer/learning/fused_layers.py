"""The pointwise parts of a text layer as one kernel each, by torch.compile: norms, rotary positions, SwiGLU.

At 3B these read and write as long as matrix products compute (docs/memory.md). Only functions of tensors are
compiled: ZeRO's hooks stay on the modules around them, and a row of another length compiles nothing anew. A
compiled kernel rounds once where the plain one rounds between its steps, so a run's bits are others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

ROTARY = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_vision")
"""Names of transformers' functions that apply rotary positions."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm in fp32 of x [..., width], as transformers computes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def centered_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same as Qwen3.5 computes it: its weights are differences from 1."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of a gated delta-net layer's output, times silu(gate), both [..., width]."""
    return (rms_norm(x, weight, eps) * nn.functional.silu(gate.float())).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [..., width]."""
    return nn.functional.silu(gate) * up


GRAPHS = 64
"""Graphs of one function at most. Policy and reference, text and tower, scoring and learning have one
each: more than torch's own limit of 8, and the next one ends the run."""


@cache
def compiled_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one kernel, for every length of its rows."""
    how: dict[str, Any] = {"recompile_limit": GRAPHS}  # which torch's own types leave out
    return torch.compile(function, dynamic=True, fullgraph=True, **how)


def _norm(module: Any, x: Tensor) -> Tensor:
    return compiled_kernel(rms_norm)(x, module.weight, module.variance_epsilon)


def _centered_norm(module: Any, x: Tensor) -> Tensor:
    return compiled_kernel(centered_norm)(x, module.weight, module.eps)


def _gated_norm(module: Any, x: Tensor, gate: Tensor) -> Tensor:
    return compiled_kernel(gated_norm)(x, gate, module.weight, module.variance_epsilon)


def _mlp(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(compiled_kernel(swiglu)(module.gate_proj(x), module.up_proj(x)))


NORMS: dict[str, Callable[..., Tensor]] = {
    "Qwen3_5RMSNorm": _centered_norm,
    "Qwen3_5RMSNormGated": _gated_norm,
    "Qwen3_5MoeRMSNorm": _centered_norm,
    "Qwen3_5MoeRMSNormGated": _gated_norm,
    "Qwen3NextRMSNorm": _centered_norm,
    "Qwen3NextRMSNormGated": _gated_norm,
}
"""Norms of other form, by the name of transformers' class."""


def fuse_layers(model: nn.Module) -> int:
    """Puts compiled functions into a model's norms, SwiGLU layers and rotary positions; returns how many
    modules it changed. Raises NotImplementedError if it knows no module of the model, or if an MLP is no
    SwiGLU."""
    compiled = [(module, _compiled_forward(module)) for module in model.modules()]
    changed = [(module, forward) for module, forward in compiled if forward is not None]
    for module, forward in changed:
        module.forward = partial(forward, module)
    if not changed:
        raise NotImplementedError(
            f"{type(model).__name__} has no layer that is known here: set model.kernels=plain"
        )

    for source in {type(module).__module__ for module, _ in changed}:
        modeling = sys.modules[source]
        for name in ROTARY:
            plain = getattr(modeling, name, None)
            already_compiled = hasattr(plain, "_torchdynamo_orig_callable")
            if plain is not None and not already_compiled:
                setattr(modeling, name, compiled_kernel(plain))
    return len(changed)


def _compiled_forward(module: Any) -> Callable[..., Tensor] | None:
    """The compiled forward pass of a norm or an MLP, which takes the module first; None for other modules."""
    kind = type(module).__name__
    if kind in NORMS:
        return NORMS[kind]
    if hasattr(module, "variance_epsilon"):
        return _norm
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
        if not type(module.act_fn).__name__.startswith("SiLU"):  # torch's, or transformers' own class
            raise NotImplementedError(f"{kind} is no SwiGLU: set model.kernels=plain")
        return _mlp
    return None
