"""Gated delta-net layers (arXiv 2412.06464) over packed rows: no state passes from one sample to the next.

These layers read a sequence in order, so a completion needs all of its prompt before it. Their projections
run over the packed row. For the convolution and the recurrence alone every sample is laid out from its
prompt's first token on, and of the results only those of the row's own tokens are taken back; a shared
prompt's gradients from all of its completions add up.

The layers pass `layout` on to two functions of transformers' module, the ones that mix tokens. `use` puts
functions of this file in their place, which call the originals.
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
"""Attribute that marks the functions of this file that `use` has put in place of transformers'."""


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
    """Wraps the causal convolution: given a `layout`, it convolves each sample by itself. The row is
    [1, C, T]."""

    @wraps(plain)
    def packed(row: Tensor, *args: Any, layout: Layout | None = None, **kwargs: Any) -> Tensor:
        if layout is None:
            return plain(row, *args, **kwargs)
        parts, place = _samples(layout.q, layout.k, row.device, as_one=False)
        outs = []
        for part in parts:
            samples = part.laid_out(row[0].t(), layout).transpose(1, 2)
            outs.append(plain(samples, *args, **kwargs).transpose(1, 2).flatten(0, 1))
        return torch.cat(outs).index_select(0, place).t()[None]

    setattr(packed, OURS, True)
    return packed


def recurrence(plain: Callable[..., Any], variable: bool | None = None) -> Callable[..., Any]:
    """Wraps the gated delta rule: given a `layout`, each sample has a state of its own. Rows are
    [1, T, heads, ...].

    variable: whether `plain` takes the boundaries of samples as `cu_seqlens`. None: it does on a GPU, if
    flash-linear-attention's kernel does.
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
        takes_boundaries = variable
        if takes_boundaries is None:
            takes_boundaries = query.is_cuda and _kernel_takes_boundaries()
        if takes_boundaries:
            kwargs["cu_seqlens"] = layout.cu_k.long()
        parts, place = _samples(layout.q, layout.k, query.device, as_one=takes_boundaries)
        outs = []
        for part in parts:
            q, k, v, decay, rate = (part.laid_out(row[0], layout) for row in (query, key, value, g, beta))
            outs.append(plain(q, k, v, g=decay, beta=rate, **kwargs)[0].flatten(0, 1))
        return torch.cat(outs).index_select(0, place)[None], None

    setattr(packed, OURS, True)
    return packed


@cache
def _kernel_takes_boundaries() -> bool:
    """Whether transformers runs flash-linear-attention's kernel, and it takes the boundaries of samples.
    transformers runs it instead of its own loop where it can be imported."""
    try:
        kernel = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except Exception:  # a Triton that does not fit raises many things, and transformers takes its loop then
        return False
    return "cu_seqlens" in inspect.signature(kernel).parameters


@dataclass(frozen=True)
class _Samples:
    """Samples of about one length, padded to that length at their ends. Padding comes last, so no real token
    sees it."""

    keys: Tensor
    """[count * length] into the layout's list of keys; padding points anywhere."""
    count: int

    def laid_out(self, row: Tensor, layout: Layout) -> Tensor:
        """[T, ...] -> [count, length, ...]"""
        tokens = self.keys if layout.kv_index is None else layout.kv_index[self.keys]
        return Spread.apply(row, tokens).unflatten(0, (self.count, -1))


@lru_cache(maxsize=6)
def _samples(
    q: tuple[int, ...], k: tuple[int, ...], device: torch.device, as_one: bool
) -> tuple[list[_Samples], Tensor]:
    """The samples of a layout by length, and where each token of the row stands in their joined outputs, [T].

    q: each sample's tokens in the row. k: each sample's tokens with those of its prompt; the row's own are
    the last. as_one: lays all samples end to end, without padding, as if they were one sample.
    """
    ends = list(accumulate(k))
    if as_one:
        places = [torch.arange(end - count, end) for end, count in zip(ends, q, strict=True)]
        return [_Samples(torch.arange(sum(k)).to(device), 1)], torch.cat(places).to(device)

    by_length: dict[int, list[int]] = {}
    for sample, tokens in enumerate(k):
        by_length.setdefault(_rounded(tokens), []).append(sample)

    lengths = torch.tensor(k)
    starts = torch.tensor(ends) - lengths
    parts = []
    places = [torch.empty(0, dtype=torch.long)] * len(q)
    output_start = 0
    for padded, members in by_length.items():
        position = torch.arange(padded)
        real = position < lengths[members, None]
        keys = (starts[members, None] + position).where(real, 0)
        parts.append(_Samples(keys.flatten().to(device), len(members)))
        for sample in members:
            output_end = output_start + k[sample]
            places[sample] = torch.arange(output_end - q[sample], output_end)
            output_start += padded
    return parts, torch.cat(places).to(device)


def _rounded(n: int) -> int:
    """Rounds a length up to whole chunks, and by an eighth at most from 512 on, so that few different ones
    remain."""
    step = max(CHUNK, 1 << max(n.bit_length() - 4, 0))
    return -(-n // step) * step
