"""What one rank of a LoRA policy is held to. Runs inside scenarios.py."""

from __future__ import annotations

import math
from dataclasses import replace

import peft
import torch
from deepspeed.utils import safe_get_full_grad
from transformers import AutoConfig, BitsAndBytesConfig

from tests.families import loader
from tests.learning import plain
from tests.learning.one_rank import OneRank
from tests.learning.scenarios import gaps, prompts_for, shard_sums, start, update
from trainer.algorithm.batching import TrainBatch
from trainer.learning.zero.partition import whole_shape


def adapters_against_peft(config, rank, port):
    """Against plain peft in one process, at factors A and B that are not zero: the gradients of an update,
    and the merged weights; the reference against the model without adapters; the engine, where there is one;
    a resume."""

    def value(name, shape):
        g = torch.Generator().manual_seed(sum(map(ord, name)))
        return torch.randn(shape, generator=g) * 0.1

    def adapted(model):
        out = peft.get_peft_model(model, peft.LoraConfig(**config.lora.peft()))
        with torch.no_grad():
            for name, p in out.named_parameters():
                if p.requires_grad:
                    p.copy_(value(name.removeprefix("base_model.model."), p.shape))
        return out

    configuration = AutoConfig.from_pretrained(config.model.path)

    def load():
        options = {"dtype": torch.float32, "attn_implementation": "sdpa", "experts_implementation": "eager"}
        if config.lora.qlora:
            options["quantization_config"] = BitsAndBytesConfig(
                **config.lora.quantization(config.model.dtype)
            )
        # bitsandbytes' kernel for inference on CPU is another than that for training.
        return loader(configuration.model_type).from_pretrained(config.model.path, **options).train()

    encoded = plain.prompts(configuration)
    items = plain.items(encoded)
    theirs = plain.padded_gradients(config.model.path, encoded, items, adapt=lambda _: adapted(load()))[1]
    # before models come sharded
    theirs = {name.removeprefix("base_model.model."): g for name, g in theirs.items()}
    want = {} if config.lora.qlora else dict(adapted(load()).merge_and_unload().named_parameters())
    base = plain.padded_gradients(config.model.path, encoded, items)[0]

    worker = start(config, rank, port)
    policy, encoded_row = worker.policy, worker.reader.encoded

    def given(split, row):
        return encoded[row]

    shapes = {name: whole_shape(p) for name, p in policy.weights.names.items() if p.requires_grad}

    def first(kind, name, start, stop):
        whole = value(name, shapes[name]) if kind == "master" else torch.zeros(shapes[name])
        return whole.flatten()[start:stop]

    policy.load(lambda wanted: (first(*one) for one in wanted))
    policy.loaded(0)
    policy.states.reload()
    out: dict = {"trained": sum(math.prod(shape) for shape in shapes.values())}
    if want:
        full = {name: p.clone() for group in policy.weights.groups(1 << 16) for name, p in group}
        out["names"] = sorted(want.keys() ^ full.keys())
        out["merged"] = max(float((full[name] - p).abs().max()) for name, p in want.items() if name in full)
    four = [p for p in policy.weights.names.values() if hasattr(p, "quant_state")]
    out["bytes"] = sum(getattr(p, "ds_tensor", p).nbytes for p in four)
    out["numbers"] = sum(p.quant_state.shape.numel() for p in four)

    head = policy.trained.module.model.lm_head
    banned, worker.reader.encoded = head.banned.clone(), given
    head.banned.zero_()  # plain transformers bans nothing
    if config.lora.qlora:  # in the documented order: evaluated before the first step
        out["evaluated"] = [len(values) for values in worker.logprobs([items.traces])["old"]]
    out["reference"] = [reference(worker, items, base)] if config.method == "grpo" else []
    ours, step = {}, policy.trained.step

    def stepping():
        if policy.trained.is_gradient_accumulation_boundary():
            ours.update({name: safe_get_full_grad(policy.weights.names[name]).float() for name in shapes})
        step()

    policy.trained.step = stepping
    policy.config = replace(config, method="grpo", optimizer=replace(config.optimizer, max_grad_norm=0.0))
    update(worker, items, 150)
    policy.trained.step = step
    out["gradients"] = plain.differences(ours, theirs)
    out["without"] = policy.without_gradient

    kept = policy.shards(lambda key, t: t.detach().clone())
    if config.method == "grpo":
        out["reference"].append(reference(worker, items, base))
        worker.reader.encoded = encoded_row
        head.banned.copy_(banned)
        worker.sampler.load(1)
        samples = worker.sample(prompts_for(worker, [0, 1, 2, 3]), 2, 1.0, 16)
        out["engine"] = gaps(worker, samples)
        worker.sampler.rest()
        worker.reader.encoded = given
    update(worker, items, 150)
    if config.method == "grpo":
        worker.reader.encoded = encoded_row
        out["stale"] = gaps(worker, samples)
        worker.reader.encoded = given
    after = shard_sums(worker)
    policy.load(lambda wanted: (kept[name].tensors[kind] for kind, name, _, _ in wanted))
    policy.loaded(1)
    policy.states.reload()
    update(worker, items, 150)
    out["resumed"] = shard_sums(worker) == after
    return out


def reference(worker: OneRank, items: TrainBatch, base: torch.Tensor) -> list[float]:
    """Largest and mean distance of the reference's log-probabilities to `base`; and those of all items, one
    pass."""
    found = torch.from_numpy(worker.logprobs([items.traces], old=False, reference=True)["reference"][0])
    gap = (found - base).abs()
    return [float(gap.max()), float(gap.mean()), *found.tolist()]
