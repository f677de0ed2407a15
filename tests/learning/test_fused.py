"""Compiled norms, SwiGLU and rotary positions against the plain ones: the same log-probabilities and
gradients."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from tests.learning import plain
from trainer.algorithm.batching import collate
from trainer.config import override
from trainer.data.processor import mrope_positions
from trainer.learning import blocks, fused_layers
from trainer.learning.logprobs import LogprobModel


@pytest.fixture
def plain_functions():
    """Puts transformers' own rotary functions back afterwards, also in modules that the test loads first."""
    yield
    for key, module in list(sys.modules.items()):
        if not key.startswith("transformers.models.qwen"):
            continue
        for name in fused_layers.ROTARY:
            function = getattr(module, name, None)
            if hasattr(function, "_torchdynamo_orig_callable"):
                setattr(module, name, function._torchdynamo_orig_callable)


def loaded(folder, again: bool):
    from transformers import AutoModelForImageTextToText

    hf = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    if again:
        blocks.recompute(blocks.blocks_of(hf), random=False)
    return hf


def row_of(hf, encoded, samples):
    """All samples in one packed row."""

    def positions(ids, grid):
        grids = () if grid is None else tuple(map(tuple, grid.tolist()))
        return mrope_positions(tuple(ids), grids, hf.config.image_token_id, 2)

    return collate(samples.traces, lambda trace: encoded[trace.row], positions)


def learned(hf, encoded, samples) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities and gradients of a packed row."""
    model = LogprobModel(hf, [], 1.0, False).train()
    logp = model(row_of(hf, encoded, samples))[0]
    weights = torch.from_numpy(np.concatenate(samples.advantages)) / samples.tokens
    (-weights * logp).sum().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return logp.detach(), found


@pytest.mark.long
@pytest.mark.usefixtures("plain_functions")
@pytest.mark.parametrize(
    ("family", "again"), [("qwen2_5_vl", True), ("qwen3_vl", False), ("qwen3_5_moe", False)]
)
def test_a_row_is_what_it_was(family_model, family, again):
    folder = family_model(family)
    hf = loaded(folder, again)
    encoded = plain.prompts(hf.config)
    samples = plain.items(encoded)
    want, want_gradients = learned(hf, encoded, samples)

    hf, reference = loaded(folder, again), loaded(folder, False).requires_grad_(False)
    for model in (hf, reference):
        assert fused_layers.fuse_layers(model) >= 3 * hf.config.text_config.num_hidden_layers + 1
        with torch.no_grad():  # both are scored before one learns: torch's limit is 8 graphs of a function
            scored = LogprobModel(model, [], 1.0, False)(row_of(model, encoded, samples))[0]
        assert float((scored - want).abs().max()) < 2e-5
    logp, gradients = learned(hf, encoded, samples)
    assert float((logp - want).abs().max()) < 2e-5
    assert gradients.keys() == want_gradients.keys()
    for name, gradient in gradients.items():
        scale = float(want_gradients[name].norm())
        assert float((gradient - want_gradients[name]).norm()) <= 1e-5 * scale + 1e-9, name


def test_norms_of_qwen3_5_are_transformers():
    """The functions as they are given to the compiler."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

    centered, gated = Qwen3_5RMSNorm(64).bfloat16(), Qwen3_5RMSNormGated(64).bfloat16()
    rows, gate = torch.randn(2, 5, 64).bfloat16()
    for module in (centered, gated):
        module.weight.data.normal_(0.5, 0.2)
        assert type(module).__name__ in fused_layers.NORMS
    assert torch.equal(fused_layers.centered_norm(rows, centered.weight, centered.eps), centered(rows))
    ours = fused_layers.gated_norm(rows, gate, gated.weight, gated.variance_epsilon)
    assert torch.equal(ours, gated(rows, gate))


@pytest.mark.slow
def test_other_lengths_compile_nothing_anew():
    gate = torch.randn(1, 7, 64, requires_grad=True)
    fused_layers.compiled_kernel(fused_layers.swiglu)(gate, gate).sum().backward()
    before = counters["stats"]["unique_graphs"]
    for length in (3, 50, 1111):
        rows = torch.randn(1, length, 64, requires_grad=True)
        fused_layers.compiled_kernel(fused_layers.swiglu)(rows, rows).sum().backward()
    assert counters["stats"]["unique_graphs"] == before


def test_a_model_of_other_parts_is_refused():
    with pytest.raises(NotImplementedError, match="model.kernels=plain"):
        fused_layers.fuse_layers(torch.nn.Linear(2, 2))


@pytest.mark.long
def test_two_ranks_agree_with_their_engine(run_ranks, small_config):
    """Under ZeRO-3 and with a reference, before and after three updates. Ranks on a CPU have the compiler on
    only with this option."""
    result = run_ranks("parity", override(small_config, ["model.kernels=compiled"]), timeout_s=600)[0]
    mean = max(m for _, m in result["gaps"])
    assert mean < 1e-4 and result["stale"][1] > 2 * mean
