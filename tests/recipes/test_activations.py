"""The counted activations against real passes: what autograd saves, and the peak of live tensors."""

from __future__ import annotations

import dataclasses
import itertools
import json
import weakref
from typing import Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from recipes.plan import activations
from recipes.presets import get
from tests.conftest import ROOT
from tests.families import matrix
from trainer import config as c
from trainer.config import budget
from trainer.hardware.model_shapes import shape_of

LENGTH, SIZE = 192, 3
MEASURED = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe")


class Live(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are still referenced, and their peak."""

    def __init__(self, known) -> None:
        super().__init__()
        self.seen = weakref.WeakSet(t.untyped_storage() for t in known)
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tree_map(lambda x: self._note(x) if isinstance(x, torch.Tensor) else None, out)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self.seen:
            return
        self.seen.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, size: int) -> None:
        self.now -= size


def measure(model_dir, data, dtype: Literal["bf16", "fp32"], again: bool, rank: int = 0):
    """(the configuration, with images as large as they came out; bytes saved for the backward pass; peaks of
    a pass without gradients and of a backward pass)."""
    from transformers import AutoModelForImageTextToText

    from tests.learning.one_rank import trace
    from trainer.algorithm.batching import collate
    from trainer.data.dataset import Dataset
    from trainer.data.processor import Prompter
    from trainer.learning import blocks, lora
    from trainer.learning.logprobs import LogprobModel

    config = c.RunConfig(
        method="sft",
        model=c.Model(
            path=str(model_dir), dtype=dtype, gradient_checkpointing=again, min_pixels=50176, max_pixels=50176
        ),
        data=c.Data(path=str(data)),
        algorithm=c.Algorithm(micro_batch_tokens=SIZE * LENGTH, logprob_tokens=SIZE * LENGTH),
        sft=c.SFT(max_tokens=LENGTH),
        lora=c.LoRA(rank=rank),
    )
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch_dtype)
    if rank:
        lora.inject_adapters(model, config.lora, 0)
    if again:
        blocks.recompute(blocks.blocks_of(model), random=False)
    scorer = LogprobModel(model, [], 1.0, not config.tower_trained).train()
    prompter, rows = Prompter(config.model), Dataset(str(data), "train")
    prompts = [prompter.encode(rows[i]) for i in range(SIZE)]
    items = [trace(i, p.token_ids, [100] * (LENGTH - len(p.token_ids))) for i, p in enumerate(prompts)]
    batch = collate(items, lambda t: prompts[t.row], prompter.positions)
    # the worst that the plan reckons with: every token is a completion's
    everywhere = torch.arange(SIZE * LENGTH)
    batch = dataclasses.replace(batch, logits_at=everywhere, targets=torch.zeros_like(everywhere))
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    known = [*model.parameters(), *model.buffers()]
    assert batch.pixel_values is not None
    patches, patch = len(batch.pixel_values), model.config.vision_config.patch_size
    with torch.no_grad(), Live(known) as live:
        live._note(batch.pixel_values)  # as it comes from the host
        scorer(batch)
    with Live(known) as learning:
        learning._note(batch.pixel_values)
        logprobs = scorer(batch)[0]
        saved = learning.now
        learning.peak = saved
        logprobs.sum().backward()
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, max_pixels=patches * patch**2 // SIZE)
    )
    return config, saved, live.peak, learning.peak


CASES = [
    (family, rank, dtype, again)
    for family, rank in [("qwen2_vl", 0), *itertools.product(MEASURED, (0, 8))]
    for dtype in ("fp32", "bf16")
    for again in (False, True)
]
QUICK = {
    *(("qwen2_5_vl", 0, dtype, again) for dtype in ("fp32", "bf16") for again in (False, True)),
    ("qwen2_vl", 0, "bf16", True),
    ("qwen3_vl", 8, "bf16", True),
    ("qwen3_5", 0, "bf16", False),
    ("qwen3_5_moe", 0, "bf16", True),
    ("qwen3_vl_moe", 8, "fp32", True),
}


@pytest.mark.parametrize(("family", "rank", "dtype", "again"), matrix(CASES, QUICK))
def test_activations_are_those_of_the_real_model(family_model, picture_dataset, family, dtype, again, rank):
    config, saved, forward, backward = measure(family_model(family), picture_dataset, dtype, again, rank)
    shape = shape_of(str(family_model(family)))
    assert shape
    assert saved == pytest.approx(sum(activations.saved(config, shape).values()), rel=0.06)
    planned = activations.backward(config, shape)
    planned.pop("gradients of the block", 0.0)  # here each goes as it comes; ZeRO-3 keeps a block's
    assert backward == pytest.approx(sum(planned.values()), rel=0.12)
    assert forward == pytest.approx(
        max(activations.forward(config, shape), activations.logits(config, shape)), rel=0.10
    )


def test_passes_at_true_shapes_are_within_a_tenth_of_the_plan():
    """Those that were played of every recipe on tensors that hold nothing (benchmarks/rehearsal.json)."""
    for name, passes in json.loads((ROOT / "benchmarks/rehearsal.json").read_text())["passes"].items():
        config = get(name).config
        alone = dataclasses.replace(config.placement, nodes=1, workers_per_node=1)
        config = dataclasses.replace(config, placement=alone)
        shape = shape_of(config.model.path)
        assert shape
        learns = activations.scored(config, shape), activations.backward(config, shape)
        tokens = budget.logprob_tokens(config, shape)
        scores = activations.forward(config, shape, tokens), activations.logits(config, shape, tokens)
        planned = {"update": max(sum(parts.values()) for parts in learns), "logprobs": max(scores)}
        for what, most in planned.items():
            peak = max(one["peak_bytes"] for row, one in passes.items() if row.startswith(what))
            assert 0.9 <= peak / most <= 1.1, (name, what)
