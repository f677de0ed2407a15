"""What one rank is held to at every ZeRO stage. Runs inside scenarios.py."""

from __future__ import annotations

from dataclasses import replace

import peft
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from transformers import AutoConfig

from tests.learning import plain
from tests.learning.one_rank import OneRank, trainable
from tests.learning.scenarios import start

BUDGETS = (150, 100_000)
"""Several passes, and all rows packed into one."""


def zero_stages(config, rank, port):
    """Each stage's loss and gradients of a step against one process of plain torch, by several budgets; the
    same step again after a resume, bit for bit; and what every other stage makes of its checkpoint."""
    encoded = plain.prompts(AutoConfig.from_pretrained(config.model.path))
    traces = plain.items(encoded).traces
    items = trainable(traces, [1.0] * len(traces))
    logprobs, theirs = plain.padded_gradients(config.model.path, encoded, items, adapt=adapt(config))
    theirs = {name.removeprefix("base_model.model."): g for name, g in theirs.items()}
    out: dict = {"loss": -float(logprobs.mean()), "stages": {}}
    saved, workers = {}, {}
    for stage in (1, 2, 3):
        worker = begin(config, rank, port, stage, encoded)
        found: dict = {"losses": [], "gradients": []}
        for budget in BUDGETS:
            before, ours = pieces(worker), {}
            stats = step(worker, items, budget, ours)
            found["losses"].append(total(stats["loss/nll"]))
            found["gradients"].append(plain.differences(ours, theirs))
            found["norm"] = stats["grad/norm"]
            put(worker, before, worker.policy.updates - 1)
        step(worker, items, BUDGETS[0])
        saved[stage] = pieces(worker)
        step(worker, items, BUDGETS[0])
        after = pieces(worker)
        put(worker, saved[stage], 1)
        found["resumed"] = same(pieces(worker), saved[stage])
        step(worker, items, BUDGETS[0])
        found["again"] = same(pieces(worker), after)
        found["moved"] = not same(after, saved[stage])
        out["stages"][stage], workers[stage] = found, worker
    out["elsewhere"] = {}
    for stage, worker in workers.items():
        for other in saved:
            put(worker, saved[other], 1)
            loss = total(step(worker, items, BUDGETS[1], stop=True)["loss/nll"])
            out["elsewhere"][f"{other} at {stage}"] = [same(pieces(worker), saved[other]), loss]
    return out


def adapt(config):
    """What plain torch does to the model: nothing, or adapters with the factors that `first` gives ours."""

    def adapted(model):
        if not config.lora.rank:
            return model
        out = peft.get_peft_model(model, peft.LoraConfig(**config.lora.peft()))
        with torch.no_grad():
            for name, p in out.named_parameters():
                if p.requires_grad:
                    p.copy_(factor(name.removeprefix("base_model.model."), p.shape))
        return out

    return adapted


def factor(name, shape):
    g = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=g) * 0.1


def begin(config, rank, port, stage, encoded) -> OneRank:
    optimizer = replace(config.optimizer, zero_stage=stage, max_grad_norm=0.0)
    worker = start(replace(config, method="sft", optimizer=optimizer), rank, port)
    worker.reader.encoded = lambda split, row: encoded[row]
    if config.lora.rank:

        def first(kind, name, start, stop):
            shape = worker.policy.partition.shards(lambda key, t: t)[name].shape
            whole = factor(name, shape) if kind == "master" else torch.zeros(shape)
            return whole.flatten()[start:stop]

        worker.policy.load(lambda wanted: (first(*one) for one in wanted))
        worker.policy.loaded(0)
    return worker


def step(worker: OneRank, items, budget, gradients=None, stop=False) -> dict:
    """One step; gradients: where the reduced ones are put. stop: at learning rate 0."""
    policy = worker.policy
    whole = policy.trained.step

    def stepping():
        if gradients is not None and policy.trained.is_gradient_accumulation_boundary():
            for name, p in policy.partition.trained.items():
                gradients[name] = safe_get_full_grad(p).float().clone()
        whole()

    policy.trained.step = stepping
    kept = policy.config
    if stop:
        policy.config = replace(kept, optimizer=replace(kept.optimizer, learning_rate=0.0))
        before = pieces(worker)
    stats = worker.step(items, budget)
    policy.trained.step, policy.config = whole, kept
    if stop:
        put(worker, before, policy.updates - 1)
    return stats


def pieces(worker: OneRank) -> dict:
    """Every trained parameter whole, put together from all ranks' shards; each element from exactly one of
    them."""
    mine = worker.policy.shards(lambda key, t: t.detach().clone())
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    out = {}
    for name, shard in mine.items():
        for kind in shard.tensors:
            whole = torch.full((torch.Size(shard.shape).numel(),), float("nan"))
            for other in (r[name] for r in ranks):
                assert whole[other.start : other.stop].isnan().all(), f"{name} is held twice"
                whole[other.start : other.stop] = other.tensors[kind]
            assert not whole.isnan().any(), f"nobody holds all of {name}"
            out[kind, name] = whole
    return out


def put(worker: OneRank, whole: dict, updates: int) -> None:
    worker.policy.load(lambda wanted: (whole[kind, name][start:stop] for kind, name, start, stop in wanted))
    worker.policy.loaded(updates)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def total(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found)
    return float(found)
