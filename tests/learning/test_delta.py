"""Convolution and recurrence of gated delta-net layers over a packed row are those of each sample alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from trainer.algorithm.batching import build_layout
from trainer.learning.gated_delta import convolution, recurrence

# A prompt of 70 tokens with completions of 5, 130 and 1, and a sample of 20.
ROW = build_layout(
    [75, 20, 130, 1],
    [75, 20, 200, 71],
    torch.cat(
        [torch.arange(95), torch.arange(70), torch.arange(95, 225), torch.arange(70), torch.tensor([225])]
    ),
)
TOKENS = 226
HEADS, WIDTH = 2, 16


def alone():
    """Tokens of each sample from its prompt's first on, and how many at its end are the row's own."""
    assert ROW.kv_index is not None
    return list(zip(ROW.kv_index.split(ROW.k), ROW.q, strict=True))


def with_boundaries(*rows, cu_seqlens, chunk_indices, **options):
    """transformers' recurrence as a kernel for GPUs takes it: all samples in one row, bounds in a list."""
    bounds = cu_seqlens.tolist()
    assert len(chunk_indices) == sum(-(-(stop - start) // 64) for start, stop in pairwise(bounds))
    outs = []
    for start, stop in pairwise(bounds):
        parts = {name: options[name][:, start:stop] for name in ("g", "beta")}
        found = modeling.torch_chunk_gated_delta_rule(
            *(row[:, start:stop] for row in rows), **parts, use_qk_l2norm_in_kernel=True
        )
        outs.append(found[0])
    return torch.cat(outs, 1), None


@pytest.mark.parametrize("kernel", [None, with_boundaries])
def test_the_recurrence_is_that_of_each_sample(kernel):
    g = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, TOKENS, HEADS, WIDTH, generator=g, requires_grad=True) for _ in range(3)]
    decay = (-0.1 * torch.rand(1, TOKENS, HEADS, generator=g)).requires_grad_()
    rate = torch.rand(1, TOKENS, HEADS, generator=g).requires_grad_()
    learned = [*rows, decay, rate]
    weights = torch.randn(1, TOKENS, HEADS, WIDTH, generator=g)
    packed = recurrence(modeling.torch_chunk_gated_delta_rule, kernel)
    options = {"use_qk_l2norm_in_kernel": True, "use_cache": False}
    ours = packed(*rows, g=decay, beta=rate, layout=ROW, **options)[0]
    outs = []
    for tokens, own in alone():
        parts = [x[:, tokens] for x in learned]
        found = modeling.torch_chunk_gated_delta_rule(*parts[:3], g=parts[3], beta=parts[4], **options)
        outs.append(found[0][:, -own:])
    theirs = torch.cat(outs, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for mine, yours in zip(
        *(torch.autograd.grad((out * weights).sum(), learned) for out in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-5)
    unaware = modeling.torch_chunk_gated_delta_rule(*rows, g=decay, beta=rate, **options)[0]
    assert float((unaware - theirs).detach().abs().max()) > 0.01, "states pass from sample to sample"


def test_the_convolution_is_that_of_each_sample():
    g = torch.Generator().manual_seed(0)
    row = torch.randn(1, 6, TOKENS, generator=g)
    weight = torch.randn(6, 4, generator=g)
    ours = convolution(modeling.causal_conv1d_fn)(row, weight, None, activation="silu", layout=ROW)
    theirs = []
    for tokens, own in alone():
        found = modeling.causal_conv1d_fn(row[:, :, tokens], weight, None, activation="silu")
        theirs.append(found[:, :, -own:])
    torch.testing.assert_close(ours, torch.cat(theirs, 2), rtol=1e-6, atol=1e-6)
