"""Gated delta-net layers (arXiv 2412.06464) over packed rows: no state passes from one sample to the next.

These layers read a sequence in order, so a completion needs all of its prompt before it. Their projections
run over the packed row. For the convolution and the recurrence alone every sample is laid out from its
prompt's first token on, and of the results only those of the row's own tokens are taken back; a shared
prompt's gradients from all of its completions add up.

The layers pass `layout` on to two functions of transformers' module, the ones that mix tokens.
`use_packed_delta` puts functions of this file in their place. They call the originals, or on a GPU
flash-linear-attention's kernel (gated_delta_kernel.py).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from trainer.algorithm.batching import Layout, send_tensor
from trainer.config.budget import CHUNK
from trainer.learning.attention import Spread

Recurrence = Callable[..., Any]
"""Computes the gated delta rule, as transformers' `torch_chunk_gated_delta_rule` does."""


def delta_layers(model: nn.Module) -> list[Any]:
    """A model's gated delta-net layers."""
    return [module for module in model.modules() if hasattr(module, "A_log")]


def use_packed_delta(model: nn.Module, kernel: Recurrence | None = None) -> None:
    """Makes the gated delta-net layers of a model, if it has any, heed the boundaries of packed rows. kernel:
    computes the recurrence; None: PyTorch does, as transformers has it."""
    for source in {type(module).__module__ for module in delta_layers(model)}:
        modeling: Any = sys.modules[source]
        convolves = inspect.unwrap(modeling.causal_conv1d_fn)
        plain = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
        modeling.causal_conv1d_fn = convolution(convolves)
        modeling.torch_chunk_gated_delta_rule = recurrence(plain, kernel)


def convolution(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps the causal convolution: given a `layout`, it convolves each sample by itself. The row is
    [1, C, T]."""

    @wraps(plain)
    def packed(row: Tensor, *args: Any, layout: Layout | None = None, **kwargs: Any) -> Tensor:
        if layout is None:
            return plain(row, *args, **kwargs)
        parts, place = _samples(layout.q, layout.k, row.device)
        outs = []
        for part in parts:
            samples = part.laid_out(row[0].t(), layout).transpose(1, 2)
            outs.append(plain(samples, *args, **kwargs).transpose(1, 2).flatten(0, 1))
        return torch.cat(outs).index_select(0, place).t()[None]

    return packed


def recurrence(plain: Recurrence, kernel: Recurrence | None = None) -> Recurrence:
    """Wraps the gated delta rule: given a `layout`, each sample has a state of its own. Rows are [1, T,
    heads, ...]. kernel: computes a packed row in the place of `plain`; it takes the boundaries of samples."""

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
        rows = query, key, value, g, beta
        if kernel is not None:
            return end_to_end(kernel, rows, layout.q, layout.k, layout.kv_index), None
        parts, place = _samples(layout.q, layout.k, query.device)
        outs = []
        for part in parts:
            q, k, v, decay, rate = (part.laid_out(row[0], layout) for row in rows)
            outs.append(plain(q, k, v, g=decay, beta=rate, **kwargs)[0].flatten(0, 1))
        return torch.cat(outs).index_select(0, place)[None], None

    return packed


def end_to_end(
    kernel: Recurrence,
    rows: Sequence[Tensor],
    own: tuple[int, ...],
    whole: tuple[int, ...],
    places: Tensor | None,
) -> Tensor:
    """The kernel's output for a packed row, [1, T, ...]: samples are laid out end to end, without padding.

    rows: queries, keys, values, decays and rates, [1, T, heads, ...]. own, whole: each sample's tokens in the
    row, and those with its prompt's. places: of all these tokens in the row; None: the row is the samples end
    to end.
    """
    bounds, chunks, kept = _bounds(own, whole, rows[0].device)
    if places is not None:
        rows = [Spread.apply(row[0], places)[None] for row in rows]
    q, k, v, decay, rate = rows
    out = kernel(
        q,
        k,
        v,
        g=decay,
        beta=rate,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=bounds,
        chunk_indices=chunks,
    )[0]
    return out[0].index_select(0, kept)[None]


@lru_cache(maxsize=6)
def _bounds(q: tuple[int, ...], k: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where samples that lie end to end begin, int64 [samples + 1]; the sample and the place in it of each
    chunk, [chunks, 2]; and where each token of the row stands among them, [T]. The kernel would read the
    bounds back from the GPU to make the chunks. All layers get the same tensors."""
    ends = list(accumulate(k))
    places = [torch.arange(end - count, end) for end, count in zip(ends, q, strict=True)]
    chunks = [[sample, chunk] for sample, tokens in enumerate(k) for chunk in range(-(-tokens // CHUNK))]
    made = torch.tensor([0, *ends]), torch.tensor(chunks), torch.cat(places)
    bounds, chunk_indices, place = (send_tensor(tensor, device) for tensor in made)
    return bounds, chunk_indices, place


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
def _samples(q: tuple[int, ...], k: tuple[int, ...], device: torch.device) -> tuple[list[_Samples], Tensor]:
    """The samples of a layout by length, and where each token of the row stands in their joined outputs, [T].
    q: each sample's tokens in the row. k: each sample's tokens with those of its prompt; the row's own are
    the last."""
    by_length: dict[int, list[int]] = {}
    for sample, tokens in enumerate(k):
        by_length.setdefault(_rounded(tokens), []).append(sample)
    lengths = torch.tensor(k)
    starts = lengths.cumsum(0) - lengths
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
