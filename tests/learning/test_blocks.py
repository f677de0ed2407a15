"""Blocks are what is gathered, recomputed and reduced: a pass runs a block's hooks once forward and once
backward."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig

from tests.families import FAMILIES, loader
from trainer import config as c
from trainer.learning import blocks
from trainer.learning.zero import private_names, sharded
from trainer.learning.zero.private_names import GATHERING, NEEDED, RELEASE, STAGE_3

FRAMES = 24
"""Python frames with which a block is gathered, released and reduced in a pass, of any number of
parameters."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_every_family_is_a_block(family, family_model):
    config = AutoConfig.from_pretrained(family_model(family))
    with torch.device("meta"):
        model = loader(family).from_config(config)
    text = getattr(config, "text_config", config)
    tower = config.vision_config.depth if hasattr(config, "vision_config") else 0
    assert len(blocks.blocks_of(model)) == text.num_hidden_layers + tower


def test_a_model_without_the_blocks_of_its_family_is_refused(family_model):
    config = AutoConfig.from_pretrained(family_model("qwen2"))
    with torch.device("meta"):
        model = loader("qwen2").from_config(config)
    model.config.model_type = "qwen3"
    with pytest.raises(LookupError, match="has no Qwen3DecoderLayer"):
        blocks.blocks_of(model)


class Block(nn.Module):
    """A linear layer, whose dropout draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5)
        self.events: list[str] = []
        self.register_forward_pre_hook(lambda *_: self.events.append("forward"))
        self.register_full_backward_hook(self._after)

    def _after(self, *_) -> None:
        ready = all(p.grad is not None for p in self.parameters())
        self.events.append("gradients are there" if ready else "too early")

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return hidden + scale * self.dropout(self.linear(hidden)).relu()


def row() -> torch.Tensor:
    return torch.randn(1, 9, 6, generator=torch.Generator().manual_seed(1))


def passed(block: Block, hidden: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(0)
    out = block(hidden, scale=2.0)
    (out * row()).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in block.parameters() if p.grad is not None)]


def test_a_recomputed_block_runs_its_hooks_once_and_draws_the_same_numbers():
    block = Block()
    want = passed(block, row().requires_grad_())
    block.zero_grad()
    blocks.recompute([block], random=True)
    block.events.clear()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = passed(block, row().requires_grad_())
    assert block.events == ["forward", "gradients are there"]
    assert all(map(torch.equal, found, want))
    with torch.no_grad():
        assert torch.equal(block.eval()(row()), block.eval()(row()))


def test_behind_a_frozen_layer_a_block_is_reduced_when_its_gradients_are_there():
    """With adapters the embedding is frozen, and the first block's input has no gradient."""
    block = Block()
    passed(block, row())
    assert block.events == ["forward", "too early"]
    block.zero_grad()
    block.events.clear()
    blocks.begin_gradients([block])
    blocks.recompute([block], random=True)
    passed(block, row())
    assert block.events == ["forward", "gradients are there"]


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_that_keeps_its_parameter_has_torchs_outputs_and_gradients(bias):
    plain = nn.Linear(6, 4, bias=bias)
    ours = nn.Linear(6, 4, bias=bias)
    ours.load_state_dict(plain.state_dict())
    blocks.keep_no_gathered_weights(ours, [])
    found = []
    kept: list[torch.Tensor] = []
    for layer in (plain, ours):
        hidden = row().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            out = layer(hidden)
        out.square().sum().backward()
        found.append([out, hidden.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert any(tensor is ours.weight for tensor in kept)


def test_linear_layers_of_recomputed_blocks_are_torchs_own():
    model = nn.Sequential(Block(), nn.Linear(6, 6))
    blocks.keep_no_gathered_weights(model, [model[0]])
    assert "forward" not in vars(model[0].linear) and "forward" in vars(model[1])


@pytest.mark.parametrize("ranks", [2, 4, 6, 32])
def test_whole_parameters_begin_where_kernels_for_matrices_want_them(monkeypatch, ranks):
    """Behind a bias of 3,420 elements, as in Qwen2.5-VL's tower, an address would be a multiple of 8."""
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    module = nn.ParameterList(
        [torch.zeros(shape, dtype=torch.bfloat16) for shape in ((3420,), (7, 9), (16,))]
    )
    parameters: list[Any] = list(module)
    for parameter in parameters:
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
        parameter.ds_tensor = parameter.new_empty(-(-parameter.numel() // ranks))
        parameter.ds_process_group = None
    memory = sharded._Block(module, sharded._Lane(torch.device("cpu"))).memory
    assert [list(whole.shape) for whole in memory.whole] == [[3420], [7, 9], [16]]
    assert all(whole.storage_offset() * 2 % 16 == 0 for whole in memory.whole)


@pytest.mark.slow
@pytest.mark.parametrize(("again", "live"), [(True, 0), (False, 1_000_000_000), (False, 0)])
def test_a_pass_of_a_rank_gathers_whole_blocks_and_learns_what_deepspeed_does(
    run_ranks, small_config, again, live
):
    """Counts do not depend on the machine: Python runs a few times a block, never for each parameter of it,
    and nothing stays gathered. On two ranks the bits are those of DeepSpeed's own gathers and sums."""
    config = replace(
        small_config,
        model=replace(small_config.model, gradient_checkpointing=again),
        optimizer=replace(small_config.optimizer, live_parameters=live),
    )
    theirs = run_ranks("block_passes", replace(config, run=replace(config.run, name="deepspeed")))
    for result, by_deepspeed in zip(run_ranks("block_passes", config), theirs, strict=True):
        assert result["learned"] == by_deepspeed["learned"]
        times = result["blocks"] * result["passes"]
        assert result["blocks"] > 0 and result["of_blocks"] == 0 and result["whole"] == 0
        assert result["others"] <= 2 * result["outside"] * result["passes"]
        gathers = 2 * times if live == 0 else times  # with much memory a block stays whole between passes
        assert gathers < result["gathers"] <= gathers + result["others"]
        assert result["frames"] <= FRAMES * times < result["frames_of_deepspeed"]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "lora"), [(1, 0), (2, 4)])
def test_where_a_release_lacks_a_name_deepspeed_gathers_and_learns_the_same(
    run_ranks, small_config, world, lora
):
    """On one rank, which keeps its weights; and with adapters, whose blocks are trained in part."""
    config = replace(
        small_config,
        lora=c.LoRA(rank=lora, alpha=8),
        placement=replace(small_config.placement, workers_per_node=world),
    )
    theirs = run_ranks("block_passes", replace(config, run=replace(config.run, name="deepspeed")))
    for result, by_deepspeed in zip(run_ranks("block_passes", config), theirs, strict=True):
        assert result["learned"] == by_deepspeed["learned"]
        assert by_deepspeed["of_blocks"] > 0 == result["of_blocks"]


ROOM = Path(private_names.__file__).parents[1]
READ_ELSEWHERE = {"ds_shape", "ds_numel", "ds_tensor", "empty_partition_cache", "parameter_offload"}
ABSENT = {STAGE_3: "grad_position name_of_no_release", "runtime.zero.no_module": "other_name"}


def test_the_release_that_is_pinned_has_every_name():
    assert private_names.absent(NEEDED) == private_names.absent(GATHERING) == private_names.LACKING == []
    pinned = (ROOM.parents[1] / "requirements/gpu.txt").read_text()
    assert f"deepspeed=={RELEASE}" in pinned


def test_a_name_that_is_gone_is_said_with_the_release_that_has_it():
    gone = f"has no {STAGE_3}.name_of_no_release, runtime.zero.no_module.other_name"
    with pytest.raises(ImportError, match=f"{re.escape(gone)}: install deepspeed=={RELEASE}"):
        private_names.lacking(ABSENT, GATHERING)
    with pytest.warns(UserWarning, match=f"{re.escape(gone)}, so it gathers and reduces by itself"):
        assert len(private_names.lacking(NEEDED, ABSENT)) == 2


def test_no_other_file_of_the_room_reads_one():
    names = {name for listed in (*NEEDED.values(), *GATHERING.values()) for name in listed.split()}
    pattern = re.compile(rf"\.({'|'.join(map(re.escape, names - READ_ELSEWHERE))})\b")
    for path in ROOM.rglob("*.py"):
        if path.name != "private_names.py":
            assert pattern.findall(path.read_text()) == [], path
