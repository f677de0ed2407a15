"""Experts in grouped products are transformers' loop over experts, and keep no copy of gathered weights."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from trainer.learning import experts
from trainer.system.errors import ConfigError


def block(implementation: str) -> Qwen3MoeSparseMoeBlock:
    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True
    )
    config._experts_implementation = implementation
    made = Qwen3MoeSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    made.gate.weight.data[5] = -made.gate.weight.data[2]  # rarely chosen with it
    return made


@pytest.mark.parametrize("tokens", [1, 2, 200])
def test_outputs_and_gradients_are_those_of_the_loop(tokens):
    """With one token most experts have no row."""
    rows = torch.randn(1, tokens, 32, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(1, tokens, 32, generator=torch.Generator().manual_seed(2))
    found = []
    for name in ("eager", experts.NAME):
        made, seen = block(name), rows.clone().requires_grad_()
        out = made(seen)
        (out * weights).sum().backward()
        found.append([out, seen.grad, *(p.grad for p in made.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).norm()) < 1e-6 * float(theirs.norm())


def test_what_autograd_keeps_of_the_weights_are_the_parameters_themselves():
    """ZeRO-3 empties a parameter after the forward pass. A view that is kept would keep what it gathered."""
    made = block(experts.NAME)
    kept: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        made(torch.randn(1, 9, 32, requires_grad=True))
    for parameter in (made.experts.gate_up_proj, made.experts.down_proj):
        own = parameter.untyped_storage().data_ptr()
        views = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() == own]
        assert len(views) == 1 and views[0] is parameter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_compared_with_a_loop_before_a_run(dtype):
    experts.check_grouped_products(block(experts.NAME), torch.device("cpu"), dtype)
    experts.check_grouped_products(
        torch.nn.Linear(2, 2), torch.device("cpu"), dtype
    )  # no experts, nothing to compare


@pytest.mark.parametrize("wrong", ["garbage", "NaN", "a group's rows too early"])
def test_wrong_grouped_products_end_a_run(monkeypatch, wrong):
    right = experts.grouped_mm

    def product(rows, matrices, offs):
        if wrong == "a group's rows too early":
            return right(rows, matrices, offs=(offs - 1).clamp(min=0)).nan_to_num(0)
        out = right(rows, matrices, offs=offs)
        if out.ndim == 2 and len(out):
            out[0] = 7.0 if wrong == "garbage" else float("nan")
        return out

    monkeypatch.setattr(experts, "grouped_mm", product)
    with pytest.raises(
        ConfigError, match="torch's grouped products are wrong on this GPU .*take another kind"
    ):
        experts.check_grouped_products(block(experts.NAME), torch.device("cpu"), torch.float32)


def test_an_expert_without_rows_gets_zeros_whatever_torch_leaves_there(monkeypatch):
    right = experts.grouped_mm

    def leaves_garbage(rows, matrices, offs):
        out = right(rows, matrices, offs=offs)
        if out.ndim == 3:
            out[[0, 2]] = float("nan")
        return out

    monkeypatch.setattr(experts, "grouped_mm", leaves_garbage)
    rows, weight = torch.randn(5, 16), torch.randn(4, 8, 16, requires_grad=True)
    ends = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    experts.GroupedProduct.apply(rows, weight, ends).sum().backward()
    assert weight.grad is not None and float(weight.grad[[0, 2]].abs().max()) == 0
    assert bool(weight.grad[[1, 3]].isfinite().all())
