"""Packed rows with shared prompts are the padded computation, to the rounding of fp32."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.families import FAMILIES, VISION, loader, matrix
from tests.learning import plain
from tests.learning.one_rank import trace
from trainer.algorithm.batching import build_layout, collate
from trainer.data.processor import mrope_positions
from trainer.hardware import architectures
from trainer.learning import attention, blocks

IMAGE = 9
HYBRID = tuple(name for name in FAMILIES if architectures.FAMILIES[name].gated_delta)
"""Families with gated delta-net layers."""
WORST = dict.fromkeys(HYBRID, 2e-5)
"""Relative difference of the worst tensor's gradient. The decays' gradients nearly cancel: with plain
transformers one sample at a time and one padded batch differ by 5e-6."""
TOTAL = dict.fromkeys(HYBRID, 2e-6)
"""Relative difference of all gradients together, through ZeRO-3 with a sample in each pass."""


def positions(ids, grid, image: int | None = IMAGE):
    return mrope_positions(tuple(ids), () if grid is None else tuple(map(tuple, grid.tolist())), image, 2)


def test_collate_by_hand():
    """Prompt 7 with an image of 2x1 tokens and three completions, one empty, around a text prompt."""
    grid = torch.tensor([[1, 4, 2]])
    seen = {
        7: SimpleNamespace(pixel_values=torch.ones(8, 3), grid_thw=grid),
        2: SimpleNamespace(pixel_values=None, grid_thw=None),
    }
    p7, p2 = [1, IMAGE, IMAGE, 3], [4, 5]

    def encoded(t):
        return seen[t.row]

    traces = [trace(7, p7, [20, 21]), trace(2, p2, [30]), trace(7, p7, [22]), trace(7, p7, [])]
    batch = collate(traces, encoded, positions)
    assert batch.input_ids.tolist() == [[1, IMAGE, IMAGE, 3, 20, 21, 4, 5, 30, 22]]
    assert batch.logits_at.tolist() == [3, 4, 7, 3] and batch.targets.tolist() == [20, 21, 30, 22]
    assert batch.layout.q == (6, 3, 1) and batch.layout.k == (6, 3, 5)
    assert batch.layout.cu_q.tolist() == [0, 6, 9, 10] and batch.layout.cu_k.tolist() == [0, 6, 9, 14]
    assert batch.layout.kv_index is not None
    assert batch.layout.kv_index.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 9]
    time, height, width = batch.position_ids[:, 0].tolist()
    assert time == [0, 1, 1, 3, 4, 5, 0, 1, 2, 4]
    assert height == [0, 1, 2, 3, 4, 5, 0, 1, 2, 4] and width == time
    assert batch.pixel_values is not None and len(batch.pixel_values) == 8  # the tower sees the image once
    alone = collate([trace(2, p2, [30, 31])], encoded, positions)
    assert alone.layout.kv_index is None and alone.pixel_values is None
    empty = collate([], encoded, positions)
    assert empty.input_ids.shape == (1, 1) and len(empty.targets) == len(empty.logits_at) == 0


@pytest.mark.parametrize("family", VISION)
def test_positions_are_transformers(family_model, family):
    """Positions of prompt and completions, with several images and none, against `get_rope_index`."""
    model = loader(family).from_pretrained(family_model(family))
    image = model.config.image_token_id
    encoded = plain.prompts(model.config)
    for item in plain.items(encoded).traces:
        enc, ids = encoded[item.row], torch.from_numpy(item.tokens).long()[None]

        def own(i, g):
            return positions(i, g, image)

        batch = collate([item], lambda t: encoded[t.row], own)
        kinds = (ids == image).int()
        want = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=enc.grid_thw)[0]
        assert torch.equal(batch.position_ids, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_that_were_rounded_are_exact_again(family_model, family):
    """Rotary frequencies of text and tower, scaled as Llama's or not, as `zero.Init` leaves them in bf16."""
    from trainer.learning.zero.setup import exact_frequencies

    model = loader(family).from_pretrained(family_model(family))
    want = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    for name in want:
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, want[name].bfloat16())
    exact_frequencies(model)
    found = dict(model.named_buffers())
    assert want and all(torch.equal(found[name], values) for name, values in want.items())
    assert len(want) == (4 if family in VISION else 2)


def dense(q, k, v, rows, causal, scale):
    """One softmax over the whole row under a mask."""
    mask = torch.zeros(len(q), len(q), dtype=torch.bool)
    index = torch.arange(sum(rows.k)) if rows.kv_index is None else rows.kv_index
    at_q = at_k = 0
    for a, b in zip(rows.q, rows.k, strict=True):
        seen = torch.ones(a, b, dtype=torch.bool)
        mask[at_q : at_q + a, index[at_k : at_k + b]] = seen.tril(b - a) if causal else seen
        at_q, at_k = at_q + a, at_k + b
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_attention_by_shape_is_dense_attention(causal, shared):
    g, double = torch.Generator().manual_seed(0), {"dtype": torch.float64}
    lengths, index = [64, 16, 16, 64, 5, 33, 140], None
    q_lengths, k_lengths = list(lengths), list(lengths)
    if shared:  # 20 and 1 queries more that attend to the first 40 of the row and to themselves
        start = sum(lengths)
        index = torch.cat(
            [
                torch.arange(start),
                torch.arange(40),
                torch.arange(start, start + 20),
                torch.arange(40),
                torch.tensor([start + 20]),
            ]
        )
        q_lengths, k_lengths = [*lengths, 20, 1], [*lengths, 60, 41]
    rows, total = build_layout(q_lengths, k_lengths, index), sum(q_lengths)
    q = torch.randn(total, 4, 16, generator=g, **double).requires_grad_()
    k, v = (torch.randn(total, 2, 16, generator=g, **double).requires_grad_() for _ in range(2))
    weights = torch.randn(total, 4, 16, generator=g, **double)
    outs = []
    for compute in (attention.by_shape, dense):
        out = compute(q, k, v, rows, causal, 0.3)
        outs.append((out, *torch.autograd.grad((out * weights).sum(), (q, k, v))))
    for ours, theirs in zip(*outs, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10)


QUICK = ("qwen2_5_vl", "qwen2", "qwen3_vl", "qwen3_5", "qwen3_moe")
"""One of each kind of layer; the others are made of the same."""
PADDED = [*QUICK]
for name in [*FAMILIES, "smollm2"]:
    if name not in QUICK:
        PADDED.append(pytest.param(name, marks=pytest.mark.long))


@pytest.mark.parametrize(("again", "together"), [(False, 14), (True, 4)])
@pytest.mark.parametrize("family", PADDED)
def test_gradients_are_those_of_the_padded_computation(family_model, family, again, together):
    """One process: all samples in one row, and cut so that groups are split between rows."""
    from trainer.learning.logprobs import LogprobModel

    folder = family_model(family)
    hf = loader(family).from_pretrained(folder, dtype=torch.float32)
    image = getattr(hf.config, "image_token_id", None)
    encoded = plain.prompts(hf.config)
    samples = plain.items(encoded)
    if again:
        blocks.recompute(blocks.blocks_of(hf), random=False)
    model = LogprobModel(hf, [], 0.8, False).train()
    model.model.lm_head.limit = 20_000
    found = []

    def own(i, g):
        return positions(i, g, image)

    for at in range(0, len(samples), together):
        part = samples.pick(range(at, min(at + together, len(samples))))
        batch = collate(part.traces, lambda t: encoded[t.row], own)
        logp = model(batch)[0]
        weights = torch.from_numpy(np.concatenate(part.advantages)) / samples.tokens
        (-weights * logp).sum().backward()
        found.append(logp.detach())
    logp, gradients = plain.padded_gradients(folder, encoded, samples, 0.8)
    assert float((torch.cat(found) - logp).norm() / logp.norm()) < 1e-6
    ours = {n.removeprefix("model."): p.grad for n, p in model.named_parameters()}
    total, worst = plain.differences(ours, gradients)
    print(
        f"{family}, again {again}, rows of {together}: {total:.1e} over all gradients, {worst:.1e} for one"
        " tensor"
    )
    assert total < 1e-6 and worst < WORST.get(family, 2e-6)


HPZ = ("qwen2_5_vl", "qwen2")
"""Families that two ranks train with weights kept for the backward pass."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "family", "again", "hpz"),
    [
        (1, "qwen2_5_vl", False, 1),
        *matrix(
            [(2, name, name not in ("qwen3", "qwen3_5"), 2 if name in HPZ else 1) for name in FAMILIES],
            {(2, "qwen3_vl", True, 1), (2, "qwen3_5", False, 1)},
        ),
    ],
)
def test_ranks_reproduce_the_padded_gradients(
    run_ranks, small_config, family_model, world, family, again, hpz
):
    """Through ZeRO-3, the schedule and the update, with one rank that has nothing to do in some pass, or no
    image."""
    config = replace(
        small_config,
        model=replace(small_config.model, path=str(family_model(family)), gradient_checkpointing=again),
        placement=replace(small_config.placement, workers_per_node=world),
        optimizer=replace(small_config.optimizer, hpz_ranks=hpz),
    )
    for result in run_ranks("gradients", config):
        for budget, (total, worst, passes) in result.items():
            print(world, family, budget, passes, f"{total:.1e} {worst:.1e}")
            assert total < TOTAL.get(family, 1e-6) and worst < WORST.get(family, 2e-6), budget
        assert result["1"][2] > result["100000"][2] == 1
