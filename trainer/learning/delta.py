"""Gated delta-net layers (arXiv 2412.06464) over packed rows: no state passes from one sample to the next.

These layers read a sequence in order, so a completion needs all of its prompt before it. Their projections
run over the packed row. For the convolution and the recurrence alone every sample is laid out from its
prompt's first token on, and of the results only those of the row's own tokens are taken back; a shared
prompt's gradients from all of its completions add up.

The layers hand `layout` on to the two functions of transformers' module that mix tokens. These are replaced
there by functions of this file, which call the originals.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from trainer.algorithm.batching import Layout
from trainer.config.budget import CHUNK
from trainer.learning.attention import Spread

OURS = "spotrl_packed"
"""Attribute of the functions that stand in the place of transformers'."""


def use(model: nn.Module) -> None:
    """Makes the gated delta-net layers of a model, if it has any, heed the boundaries of packed rows."""
    sources = {type(module).__module__ for module in model.modules() if hasattr(module, "A_log")}
    for source in sources:
        modeling: Any = sys.modules[source]
        for name, packed in (
            ("causal_conv1d_fn", convolution),
            ("torch_chunk_gated_delta_rule", recurrence),
        ):
            plain = getattr(modeling, name)
            if not hasattr(plain, OURS):
                setattr(modeling, name, packed(plain))


def convolution(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The causal convolution, of each sample by itself where there is a `layout`. The row is [1, C, T]."""

    @wraps(plain)
    def packed(row: Tensor, *args: Any, layout: Layout | None = None, **kwargs: Any) -> Tensor:
        if layout is None:
            return plain(row, *args, **kwargs)
        parts, place = _samples(layout.q, layout.k, row.device, False)
        outs = []
        for part in parts:
            samples = part.laid_out(row[0].t(), layout).transpose(1, 2)
            outs.append(plain(samples, *args, **kwargs).transpose(1, 2).flatten(0, 1))
        return torch.cat(outs).index_select(0, place).t()[None]

    setattr(packed, OURS, True)
    return packed


def recurrence(plain: Callable[..., Any], variable: bool | None = None) -> Callable[..., Any]:
    """The gated delta rule, of each sample by itself where there is a `layout`. Rows are [1, T, heads, ...].

    variable: whether `plain` takes the boundaries of samples as `cu_seqlens`; None: where fla's kernels do,
    on a GPU.
    """

    @wraps(plain)
    def packed(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        layout: Layout | None = None,
        **kwargs: Any,
    ) -> Any:
        if layout is None:
            return plain(query, key, value, g=g, beta=beta, **kwargs)
        whole = query.is_cuda and _kernels() if variable is None else variable
        if whole:
            kwargs["cu_seqlens"] = layout.cu_k.long()
        parts, place = _samples(layout.q, layout.k, query.device, whole)
        outs = []
        for part in parts:
            q, k, v, decay, rate = (part.laid_out(row[0], layout) for row in (query, key, value, g, beta))
            outs.append(plain(q, k, v, g=decay, beta=rate, **kwargs)[0].flatten(0, 1))
        return torch.cat(outs).index_select(0, place)[None], None

    setattr(packed, OURS, True)
    return packed


@cache
def _kernels() -> bool:
    """Whether flash-linear-attention's kernel runs, which knows boundaries. transformers takes it instead of
    its own loop where it can be imported."""
    try:
        kernel = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except Exception:  # a Triton that does not fit raises many things, and transformers takes its loop then
        return False
    return "cu_seqlens" in inspect.signature(kernel).parameters


@dataclass(frozen=True)
class _Samples:
    """Samples of about one length, padded at their ends, which no earlier token sees."""

    keys: Tensor
    """[count * length] into the layout's list of keys; padding points anywhere."""
    count: int

    def laid_out(self, row: Tensor, layout: Layout) -> Tensor:
        """[T, ...] -> [count, length, ...]"""
        tokens = self.keys if layout.kv_index is None else layout.kv_index[self.keys]
        return Spread.apply(row, tokens).unflatten(0, (self.count, -1))


@lru_cache(maxsize=6)
def _samples(
    q: tuple[int, ...], k: tuple[int, ...], device: torch.device, whole: bool
) -> tuple[list[_Samples], Tensor]:
    """The samples of a layout by length, and where each token of the row stands in their joined outputs.
    whole: all of them one behind the other, as one."""
    starts = [0, *accumulate(k)]
    if whole:
        own = [torch.arange(starts[i + 1] - n, starts[i + 1]) for i, n in enumerate(q)]
        return [_Samples(torch.arange(starts[-1]).to(device), 1)], torch.cat(own).to(device)
    together: dict[int, list[int]] = {}
    for i, n in enumerate(k):
        together.setdefault(_rounded(n), []).append(i)
    parts = []
    places = [torch.empty(0, dtype=torch.long)] * len(q)
    at = 0
    for length, members in together.items():
        first = torch.tensor([[starts[i]] for i in members])
        tokens = torch.arange(length)
        real = tokens < torch.tensor([[k[i]] for i in members])
        parts.append(_Samples((first + tokens).where(real, 0).flatten().to(device), len(members)))
        for i in members:
            places[i] = torch.arange(at + k[i] - q[i], at + k[i])
            at += length
    return parts, torch.cat(places).to(device)


def _rounded(n: int) -> int:
    """Rounds a length up to whole chunks, and by an eighth at most from 512 on, so that few different ones
    remain."""
    step = max(CHUNK, 1 << max(n.bit_length() - 4, 0))
    return -(-n // step) * step
