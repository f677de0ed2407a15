"""One attention for text and vision tower over packed rows: torch's variable-length kernel, or SDPA where it
has none.

Registered with transformers under a name that contains "flash": then the tower passes whole rows with their
boundaries (no call per window) and the text model makes no mask. Text layers get the `build_layout` as an
argument."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from trainer.algorithm.batching import Layout, build_layout

NAME = "packed_flash"


def use_attention(model: Any) -> None:
    """Makes a model that was loaded with sdpa use this attention, its sub-models too. transformers refuses
    to load a model by this name."""
    model.config._attn_implementation = NAME


class Spread(torch.autograd.Function):
    """x[index]; a prompt's keys get a gradient from each of its completions, and these are added up in
    fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        """x [n, ...], index [m] -> [m, ...]."""
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # ty: ignore[incompatible-method-override]
        """[m, ...] -> [n, ...]."""
        (index,) = ctx.saved_tensors
        out = grad.new_zeros((ctx.rows, *grad.shape[1:]), dtype=torch.float32)
        return out.index_add_(0, index, grad.float()).to(grad.dtype), None


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]. As transformers calls it. Text:
    `build_layout`. Vision tower: `cu_seq_lens_q` and `max_length_q`, and `is_causal` False."""
    if attention_mask is not None or kwargs.get("sliding_window") or kwargs.get("dropout"):
        raise NotImplementedError(
            "packed rows have no masks, sliding windows or dropout: this model cannot be trained"
        )
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    q = query[0].transpose(0, 1)  # [T, H, D]
    k = key[0].transpose(0, 1)
    v = value[0].transpose(0, 1)
    scale = kwargs.get("scaling")
    rows = kwargs.get("layout")

    kernel_runs = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    if not kernel_runs:
        if rows is None:
            bounds = kwargs["cu_seq_lens_q"].tolist()
            lengths = [stop - start for start, stop in pairwise(bounds)]
            rows = build_layout(lengths, lengths)
        return by_shape(q, k, v, rows, causal, scale)[None], None

    if rows is None:
        cu = kwargs["cu_seq_lens_q"].int()
        longest = int(kwargs["max_length_q"])
        return attend_varlen(q, k, v, cu, cu, longest, longest, causal, scale)[None], None
    if rows.kv_index is not None:
        k = Spread.apply(k, rows.kv_index)
        v = Spread.apply(v, rows.kv_index)
    return attend_varlen(q, k, v, rows.cu_q, rows.cu_k, max(rows.q), max(rows.k), causal, scale)[None], None


AttentionInterface.register(NAME, attention)


# --- on a GPU


@cache
def _parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: Any,
) -> Tensor:
    """torch's flash attention over stretches of [T, H, D]; its signature grew from torch 2.10 to 2.13."""
    from torch.nn.attention.varlen import varlen_attn

    known = _parameters()
    options: dict[str, Any] = {}
    if "window_size" in known:
        options["window_size"] = (-1, 0) if causal else (-1, -1)
    else:
        options["is_causal"] = causal
    if "scale" in known:
        options["scale"] = scale
    elif scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    if "enable_gqa" in known:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    else:
        repeats = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(repeats, 1)
        v = v.repeat_interleave(repeats, 1)
    out: Any = varlen_attn(
        q.contiguous(), k.contiguous(), v.contiguous(), cu_q, cu_k, max_q, max_k, **options
    )
    return out


# --- on a CPU, and in fp32


@dataclass(frozen=True)
class _Bucket:
    """Stretches of about one shape, padded to [B, Q] queries and [B, K] keys."""

    q_rows: Tensor
    """[B * Q] into the row; padding points anywhere."""
    k_rows: Tensor
    """[B * K] into the list of keys."""
    count: int
    mask: Tensor | None
    """[B, 1, Q, K]; None where causality alone hides the padding, or there is none."""


@lru_cache(maxsize=6)
def _buckets(
    q: tuple[int, ...], k: tuple[int, ...], causal: bool, device: torch.device
) -> tuple[list[_Bucket], Tensor | None]:
    """The stretches by shape, and where each query of the row stands in the buckets' joined outputs, [T];
    None if all are of one shape and lie as they are. q, k: the queries and keys of each stretch."""
    same_shape: dict[tuple[int, int, bool], list[int]] = {}
    for stretch, (queries, keys) in enumerate(zip(q, k, strict=True)):
        shape = (_rounded(queries), _rounded(keys)) if causal else (queries, keys)
        square = queries == keys  # then causality alone hides the padding
        same_shape.setdefault((*shape, square), []).append(stretch)

    lengths_q = torch.tensor(q)
    lengths_k = torch.tensor(k)
    starts_q = torch.tensor([0, *q]).cumsum(0)
    starts_k = torch.tensor([0, *k]).cumsum(0)
    buckets = []
    place = torch.empty(sum(q), dtype=torch.long)
    outputs = 0
    for (width, depth, square), stretches in same_shape.items():
        members = torch.tensor(stretches)
        n_q = lengths_q[members, None]  # [B, 1]
        n_k = lengths_k[members, None]
        i = torch.arange(width)
        j = torch.arange(depth)
        real_q = i < n_q  # [B, Q]
        real_k = j < n_k  # [B, K]
        q_rows = (starts_q[members, None] + i).where(real_q, 0)
        k_rows = (starts_k[members, None] + j).where(real_k, 0)

        size = len(stretches) * width
        place[q_rows[real_q]] = (outputs + torch.arange(size).view(-1, width))[real_q]
        outputs += size
        mask = None
        if causal and not square:
            # The queries are the last ones of a stretch: query i may see keys up to i + n_k - n_q.
            seen = j <= i[:, None] + (n_k - n_q)[:, :, None]  # [B, Q, K]
            mask = (real_k[:, None] & seen)[:, None].to(device)
        buckets.append(_Bucket(q_rows.view(-1).to(device), k_rows.view(-1).to(device), len(stretches), mask))
    if len(buckets) == 1 and outputs == len(place):
        return buckets, None
    return buckets, place.to(device)


def _rounded(n: int) -> int:
    """Rounds a length up, so that few different shapes remain: by an eighth at most from 128 on."""
    step = max(16, 1 << max(n.bit_length() - 4, 0))
    return -(-n // step) * step


def by_shape(q: Tensor, k: Tensor, v: Tensor, rows: Layout, causal: bool, scale: Any) -> Tensor:
    """The same result by SDPA: one call for all stretches of about one shape. [T, H, D]."""
    buckets, place = _buckets(rows.q, rows.k, causal, q.device)
    outs = []
    for b in buckets:
        k_rows = b.k_rows if rows.kv_index is None else rows.kv_index[b.k_rows]
        batched = []
        for x, x_rows in ((q, b.q_rows), (k, k_rows), (v, k_rows)):
            picked = x if place is None else x.index_select(0, x_rows)
            batched.append(picked.unflatten(0, (b.count, -1)).transpose(1, 2))

        out = F.scaled_dot_product_attention(
            *batched,
            attn_mask=b.mask,
            is_causal=causal and b.mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return outs[0] if place is None else torch.cat(outs).index_select(0, place)
