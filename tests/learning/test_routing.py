"""Routing replay: a pass goes through the experts that are given, to the bit where they are the router's
own; gradients are those of a dense formula."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.families import loader
from tests.learning import plain
from tests.learning.one_rank import trace
from tests.learning.test_experts import block
from tests.learning.test_packing import positions
from trainer import config as c
from trainer.algorithm.batching import collate
from trainer.config import budget
from trainer.hardware.architectures import FAMILIES
from trainer.hardware.model_shapes import shape_of
from trainer.learning import blocks, experts
from trainer.learning.logprobs import LogprobModel
from trainer.learning.routing import Replay

EXPERTS, CHOSEN = 8, 3


def test_a_row_has_the_experts_of_its_tokens():
    """A prompt's once; -1 for the last token of a completion, which nobody has chosen for, and for a trace
    without any."""
    encoded = SimpleNamespace(pixel_values=None, grid_thw=None)
    first = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(4, 3, 2)
    second = first + 100
    prompt = [4, 5, 6]
    traces = [
        trace(0, prompt, [7, 8], routes=first),
        trace(0, prompt, [9, 10], routes=second),
        trace(1, [3], [2]),
    ]
    routes = collate(traces, lambda t: encoded, positions).routes
    assert routes is not None and routes.dtype == torch.int16
    by_token = routes.transpose(0, 1).tolist()
    nobody = [[-1, -1]] * 3
    assert by_token == [*first.tolist(), nobody, second[3].tolist(), nobody, nobody, nobody]
    assert collate(traces[2:], lambda t: encoded, positions).routes is None


QUICK = ("qwen3_moe", "qwen3_5_moe")
ROUTED = []
for name, row in FAMILIES.items():
    if row.experts:
        ROUTED.append(name if name in QUICK else pytest.param(name, marks=pytest.mark.long))


@pytest.fixture(scope="module", params=ROUTED)
def case(request, family_model):
    """(model, samples, what a pass gives); traces have the choices of the model's own routers."""
    hf = loader(request.param).from_pretrained(family_model(request.param), dtype=torch.float32)
    image = getattr(hf.config, "image_token_id", None)
    encoded = plain.prompts(hf.config)
    samples = plain.items(encoded).traces
    model = LogprobModel(hf, [], 1.0, False).train()

    def passed(traces):
        batch = collate(traces, lambda t: encoded[t.row], lambda i, g: positions(i, g, image))
        return model(batch)[0]

    kept = []
    routers = [module.gate for module in hf.modules() if hasattr(module, "experts")]
    for router in routers:
        hook = router.register_forward_hook(lambda _m, _i, out: kept.append(out[2]))
        with torch.no_grad():
            passed(samples)
        hook.remove()
    own = torch.stack(kept, 1).numpy().astype(np.uint8)  # [T, layers, k]
    routed = []
    prompts = {}
    at = 0
    for sample in samples:
        if sample.row not in prompts:
            prompts[sample.row] = own[at : at + sample.shared]
            at += sample.shared
        count = len(sample.completion)
        chosen = np.concatenate([prompts[sample.row], own[at : at + count - 1]])
        routed.append(replace(sample, routes=chosen))
        at += count
    assert at == len(own)
    return model, samples, routed, passed


def test_its_own_choices_replayed_are_the_same_pass_to_the_bit(case):
    model, samples, routed, passed = case
    found = []
    for traces in (samples, routed):
        model.zero_grad()
        logprobs = passed(traces)
        logprobs.square().sum().backward()
        found.append([logprobs.detach(), *(p.grad.clone() for p in model.parameters())])
        assert float(model.replay.differing()) == 0
    for plainly, replayed in zip(*found, strict=True):
        assert torch.equal(plainly, replayed)


def test_others_choices_change_it(case):
    model, samples, routed, passed = case
    foreign = []
    for one in routed:
        foreign.append(replace(one, routes=(one.routes + 1) % EXPERTS))
    with torch.no_grad():
        own = passed(samples)
        others = passed(foreign)
        differing = model.replay.differing()
        again = passed(samples)
    assert float((own - others).abs().mean()) > 1e-3 and torch.equal(own, again)
    assert 0.5 < float(differing) <= 1


def test_a_recomputed_layer_chooses_again_what_was_given(case):
    model, _, routed, passed = case
    foreign = []
    for one in routed:
        foreign.append(replace(one, routes=(one.routes + 1) % EXPERTS))
    layers = blocks.blocks_of(model.model)
    found = []
    for again in (False, True):
        if again:
            blocks.recompute(layers, random=False)
        model.zero_grad()
        passed(foreign).sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for layer in layers:
        del layer.forward
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_are_those_of_the_dense_formula():
    """Every expert computes every token; its share is exp(logit) over the sum of the given experts', or 0."""
    made = block(experts.NAME)
    replay = Replay(torch.nn.ModuleList([made]))
    g = torch.Generator().manual_seed(3)
    tokens = torch.randn(1, 40, 32, generator=g)
    weights = torch.randn(1, 40, 32, generator=g)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=g)[:CHOSEN] for _ in range(40)])

    def dense(seen):
        rows = seen[0]
        logits = rows @ made.gate.weight.t()
        given = torch.zeros(40, EXPERTS).scatter(1, chosen, 1.0)
        powers = logits.exp() * given
        shares = powers / powers.sum(1, keepdim=True)
        gate, up = torch.einsum("th,eoh->teo", rows, made.experts.gate_up_proj).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        out = torch.einsum("tei,ehi->teh", inner, made.experts.down_proj)
        return (out * shares[..., None]).sum(1)[None]

    def replayed(seen):
        replay.use(chosen.short()[None])
        return made(seen)

    found = []
    for compute in (dense, replayed):
        made.zero_grad()
        seen = tokens.clone().requires_grad_()
        out = compute(seen)
        (out * weights).sum().backward()
        found.append([out.detach(), seen.grad, *(p.grad.clone() for p in made.parameters())])
    assert all(float(values.norm()) > 0 for values in found[0])
    for theirs, ours in zip(*found, strict=True):
        assert float((ours - theirs).norm()) < 2e-6 * float(theirs.norm())


@pytest.mark.parametrize("key", ["algorithm.routing_replay", "rollout.expert_parallel"])
def test_a_model_without_experts_has_nothing_to_replay_or_to_deal(tiny_model, family_model, key):
    config = c.override(c.RunConfig(), [f"{key}=true"])
    budget.check_experts(config, shape_of(str(family_model("qwen3_moe"))))
    with pytest.raises(c.ConfigError, match=f"has no experts; set {key} to false"):
        budget.check_experts(config, shape_of(str(tiny_model)))
