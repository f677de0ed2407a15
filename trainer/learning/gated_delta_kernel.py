"""flash-linear-attention's kernel for the recurrence of gated delta-net layers, and a check of it on a GPU.

transformers' own recurrence, in PyTorch, is right everywhere and more than ten times slower on an H100 (its
own warning says so). Triton has miscompiled the kernel's backward pass for some cards, without an error
(flash-linear-attention's issues 640, 607 and 913: gradients of keys and decays wrong by a half, or NaN). So
before a run trains, each rank compares the kernel with PyTorch on its own GPU.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from trainer.learning import gated_delta
from trainer.system.errors import ConfigError

WITHOUT = "or set model.recurrence=torch, which is right and more than ten times slower"
LENGTHS = 70, 193, 1
"""Tokens of the samples that are compared: of two, four and one chunk of 64, and none ends with a chunk."""
ON_A_GPU = 4096, *LENGTHS
"""The same before a run trains. Triton measures at the first call which form of a kernel is fastest, and
keeps it for rows of every length: one of few tokens would tell nothing of those of a run."""
BOUND = 0.05
"""Largest difference of the kernel's output or gradients, as a share of PyTorch's in fp32. bf16 rounds a
number by 0.004; miscompiled kernels were off by 0.5."""
NAMES = "output", *(f"gradient of {row}" for row in ("queries", "keys", "values", "decays", "rates"))


def checked_kernel(
    model: nn.Module, device: torch.device, dtype: torch.dtype
) -> gated_delta.Recurrence | None:
    """The kernel for a model with gated delta-net layers, compared with PyTorch at the sizes of the first of
    them and in the model's type; None for a model without. Raises ConfigError as `load_kernel` does, and
    where the kernel is wrong here or does not run."""
    layers = gated_delta.delta_layers(model)
    if not layers:
        return None
    layer = layers[0]
    kernel = load_kernel()
    here = f"on this GPU ({device_name(device)}, Triton {version('triton')}) flash-linear-attention's kernel"
    try:
        sizes = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        with parts_of_other_kernels() as parts:
            off = kernel_differences(kernel, *sizes, device, dtype, ON_A_GPU)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # of this one machine: another try may pass
    except Exception as error:
        # Of Triton, of TileLang, of a compiler that is not there, of the package itself.
        raise ConfigError(
            f"{here} does not run ({type(error).__name__}: {error}): take another kind of GPU, {WITHOUT}"
        ) from error
    torch.cuda.empty_cache()  # for the engine, which measures what is free
    by = "Triton" + "".join(f", {part}" for part in sorted(parts))
    if wrong := first_excess(off):
        raise ConfigError(f"{here} ({by}) computes {wrong}: take another kind of GPU, {WITHOUT}")
    print(
        f"gated delta-net layers: {here} agrees with PyTorch within {max(off.values()):.2g}; by {by}",
        flush=True,
    )
    return kernel


@contextmanager
def parts_of_other_kernels() -> Generator[set[str]]:
    """What flash-linear-attention computes by other kernels than its Triton ones, as its log says, such as
    `common.chunk_bwd_dqkwg -> tilelang`. It takes TileLang on Hopper where it finds nvcc, and goes without
    a word to Triton where not. It says each choice once in a process."""
    messages = set[str]()

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.add(record.getMessage().removeprefix("[FLA Backend] "))

    logger = logging.getLogger("fla.backends")
    level, heard = logger.level, Hears()
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)


def device_name(device: torch.device) -> str:
    """The GPU's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def load_kernel() -> gated_delta.Recurrence:
    """The kernel. Raises ConfigError where it cannot be imported, or takes other arguments."""
    try:
        kernel = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except Exception as error:  # a Triton that does not fit raises many things
        raise ConfigError(
            "gated delta-net layers need flash-linear-attention's kernel on a GPU, and it cannot be imported"
            f" ({type(error).__name__}: {error}): install what requirements/gpu.txt pins as fla-core,"
            f" {WITHOUT}"
        ) from error
    missing = {"cu_seqlens", "chunk_indices"} - set(inspect.signature(kernel).parameters)
    if missing:
        raise ConfigError(
            f"fla-core {version('fla-core')} takes no {' and no '.join(sorted(missing))}: install what"
            f" requirements/gpu.txt pins, {WITHOUT}"
        )
    return kernel


def first_excess(off: dict[str, float]) -> str:
    """The first of `kernel_differences` that is no rounding, in words; "" if there is none."""
    for name, share in off.items():
        if not share < BOUND:  # NaN too
            return f"the {name} wrongly (off by {share:.2g} of it)"
    return ""


def kernel_differences(
    kernel: gated_delta.Recurrence,
    heads: int,
    key_dim: int,
    value_dim: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    lengths: tuple[int, ...] = LENGTHS,
) -> dict[str, float]:
    """How far the kernel's output and gradients are from transformers' recurrence in fp32, by their names,
    each as a share of the latter's norm. heads: of values. lengths: tokens of the samples, which are
    drawn."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)

    def drawn(*size: int) -> Tensor:
        return torch.randn(1, tokens, heads, *size, generator=generator).to(device)

    low = [drawn(size).to(dtype).requires_grad_() for size in (key_dim, key_dim, value_dim)]
    low.append((-0.2 * drawn().abs()).requires_grad_())  # decays come in fp32
    low.append(drawn().sigmoid().to(dtype).requires_grad_())
    full = [tensor.detach().float().requires_grad_() for tensor in low]
    weights = drawn(value_dim)

    packed = gated_delta.end_to_end(kernel, low, lengths, lengths, None)
    ours = _with_gradients(packed, low, weights)
    theirs = _with_gradients(_alone(full, lengths), full, weights)
    off = {}
    for name, computed, right in zip(NAMES, ours, theirs, strict=True):
        off[name] = float((computed.float() - right).norm() / right.norm())
    return off


def _alone(rows: list[Tensor], lengths: tuple[int, ...]) -> Tensor:
    """Each sample by itself, by transformers' recurrence in PyTorch."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    plain = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    outs = []
    for sample in zip(*(row.split(lengths, 1) for row in rows), strict=True):
        q, k, v, decay, rate = sample
        outs.append(plain(q, k, v, g=decay, beta=rate, use_qk_l2norm_in_kernel=True)[0])
    return torch.cat(outs, 1)


def _with_gradients(out: Tensor, rows: list[Tensor], weights: Tensor) -> list[Any]:
    return [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), rows)]
