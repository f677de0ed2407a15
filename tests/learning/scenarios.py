"""What one rank does in a test, in a process of its own (`ranks.py`). Not a test itself."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from tests.learning.one_rank import OneRank, held_bytes, trace, trainable, with_logprobs
from trainer import config as configuration
from trainer.algorithm.batching import TrainBatch
from trainer.algorithm.traces import Prompt, Trace

IN_MODULES = {
    "tests.fleet.published": ("published",),
    "tests.learning.rates": ("alone", "bare", "communicators", "context", "decoding", "rates"),
    "tests.turns.watched": ("episodes", "limited_episodes"),
}
"""Scenarios of other modules, which are imported where one runs: a check of a card has only those that it
runs. Any other name is a file of rank_scripts/, with a function of that name."""


def start(config, rank, port) -> OneRank:
    return OneRank(config).start(rank, port)


def prompts_for(worker: OneRank, rows: list[int]) -> list[Prompt]:
    return [Prompt(group=i, row=row, seed=1000 + row) for i, row in enumerate(rows)]


def gaps(worker: OneRank, traces: list[Trace]) -> list[float]:
    """Largest and mean |log-prob difference| of engine and policy on the engine's own samples."""
    (policy,) = worker.logprobs([traces])["old"]
    gap = np.abs(policy - np.concatenate([trace.logprobs for trace in traces]))
    return [float(gap.max()), float(gap.mean())]


def fixed_items(worker: OneRank, count: int = 8) -> TrainBatch:
    """Completions that do not depend on any engine, of unequal lengths, with images and without."""
    g = torch.Generator().manual_seed(0)
    allowed = [i for i in range(200) if i not in worker.prompter.banned_token_ids()]
    traces, advantages = [], []
    for i in range(count):
        n = int(torch.randint(2, 12, (1,), generator=g))
        answer = [allowed[int(k)] for k in torch.randint(0, len(allowed), (n,), generator=g)]
        traces.append(trace(i, worker.prompt_ids(i), answer))
        advantages.append(float(torch.randn(1, generator=g)))
    return trainable(traces, advantages)


def update(worker: OneRank, batch: TrainBatch, tokens: int, order=None) -> dict[str, float]:
    return worker.step(batch, tokens, order, worker.config.algorithm.kl_coef)


def weights(worker: OneRank) -> dict[str, list[float]]:
    """A few entries and the sum of every full parameter."""
    out = {}
    for group in worker.policy.weights.groups(1 << 30):
        for name, tensor in group:
            flat = tensor.double().flatten()
            out[name] = [float(flat.sum()), float(flat.square().sum()), *map(float, flat[:3])]
    return out


def sync_memory(worker: OneRank) -> list[int]:
    """Extra bytes held while each bucket of a sync is loaded: the engine's own weights and the policy's not
    counted."""
    call, held = worker.engine.call, []

    def watched(method, *args):
        result = call(method, *args)
        if method == "update_weights":
            held.append(held_bytes())
        return result

    gc.unfreeze()  # vLLM hides what was there before it from the collector
    before = held_bytes()
    worker.engine.call = watched
    worker.sampler.load(0)
    worker.engine.call = call
    return [now - before for now in held]


def built_empty() -> list[bool]:
    """Whether each model that is built from now on is built without reading weights from files."""
    from trainer.learning import policy

    found, build = [], policy._build_model

    def noted(kind, config, ds_config, empty):
        model = build(kind, config, ds_config, empty)
        found.append(empty)
        return model

    policy._build_model = noted
    return found


def parity(config, rank, port):
    """Engine against policy before and after updates; bans; determinism; memory of a sync."""
    read = built_empty()
    worker = start(config, rank, port)
    out: dict = {"gaps": [], "sync_bytes": sync_memory(worker), "read": read}
    largest = max(getattr(p, "ds_numel", 0) * p.element_size() for p in worker.policy.weights.names.values())
    out["bucket_bytes"] = max(config.rollout.sync_bucket_bytes, largest)
    rows = [0, 1, 2, 3]

    def lose_scratch(model) -> None:
        """As sleep level 2 does on a GPU."""
        for scratch in getattr(model, "deepstack_input_embeds", None) or ():
            scratch.fill_(1.0)

    for version in range(3):
        worker.engine.llm.apply_model(lose_scratch)
        worker.sampler.load(version)
        samples = worker.sample(prompts_for(worker, rows), 4, config.rollout.temperature, 16)
        out["gaps"].append(gaps(worker, samples))
        if version == 0:  # the policy has not moved from its reference
            scored = worker.logprobs([samples], reference=True)
            out["reference"] = all(map(np.array_equal, scored["old"], scored["reference"]))
        worker.sampler.rest()
        update(worker, fixed_items(worker), config.algorithm.micro_batch_tokens)
    out["stale"] = gaps(worker, samples)
    worker.sampler.load(3)

    def ask(order, temperature=1.0, n=2):
        found = worker.sample(prompts_for(worker, order), n, temperature)
        return sorted([t.row, t.index, t.completion.tolist(), t.logprobs.tolist()] for t in found)

    first = ask(rows)
    again = ask(rows)
    reversed_ = ask(rows[::-1])
    out |= {"repeat": first == again, "reversed": [x[:3] for x in first] == [x[:3] for x in reversed_]}
    hot = ask(list(range(16)), temperature=2.0, n=16)
    tokens = [t for x in hot for t in x[2]]
    banned = set(worker.prompter.banned_token_ids())
    out |= {"sampled": len(tokens), "banned": sum(t in banned for t in tokens), "distinct": len(set(tokens))}
    out["vocabulary"] = len(worker.prompter.tokenizer)
    out["experts"] = experts_held(worker)
    return out


def experts_held(worker: OneRank) -> list[int]:
    """Numbers of experts that this rank's part of the engine holds in its layers."""

    def count(model) -> list[int]:
        layers = [layer for layer in model.modules() if hasattr(layer, "w13_weight")]
        return sorted({len(layer.w13_weight) for layer in layers})

    return worker.engine.llm.apply_model(count)[0]


def invariance(config, rank, port):
    """The same steps by several token budgets, one per objective: metrics, gradient norms and resulting
    weights."""
    config = replace(config, method="sft")  # no engine
    out = {}
    for budget in (1, 120, 10_000):
        worker = start(config, rank, port)
        items, stats = fixed_items(worker), {}
        g = torch.Generator().manual_seed(1)
        for name in ("", "dr_grpo", "gspo", "cispo", "gmpo"):
            options = (
                {**configuration.Algorithm.PRESETS[name], "correction_level": "geometric"} if name else {}
            )
            worker.config = replace(config, method="grpo", algorithm=replace(config.algorithm, **options))
            worker.policy.config = worker.config
            if name:  # ratios on both sides of the bounds
                near = [(torch.randn(2, len(t.learned), generator=g) - 5).tolist() for t in items.traces]
                items = with_logprobs(items, [rollout for rollout, _ in near], [old for _, old in near])
            stats[name or "grpo"] = update(worker, items, budget)
        out[str(budget)] = {"stats": stats, "weights": weights(worker)}
    return out


def emptied(config, rank, port):
    """An update, one that has nothing to learn from, and one whose batch is empty but made all the same."""
    worker = start(replace(config, method="sft"), rank, port)
    worker.policy.config = replace(config, method="grpo")
    items = fixed_items(worker)
    update(worker, items, config.algorithm.micro_batch_tokens)
    out = {"shards": [shard_sums(worker)], "updates": [worker.policy.updates]}
    worker.learner.pass_over()
    out["shards"].append(shard_sums(worker))
    out["updates"].append(worker.policy.updates)
    worker.update([items.pick([])], 0, 0, 0.0)
    out["shards"].append(shard_sums(worker))
    return out


def imageless(config, rank, port):
    """All images on one rank, none on the other: must not hang, and must equal the mixed order."""
    config = replace(config, method="sft")
    out = {}
    for name in ("mixed", "apart"):
        worker = start(config, rank, port)
        items = fixed_items(worker, 12)
        text = [i for i, t in enumerate(items.traces) if not worker.train_set[t.row].images][:4]
        seen = [i for i, t in enumerate(items.traces) if worker.train_set[t.row].images][:4]
        chosen = items.pick(text + seen)
        order = (
            [[[0, 1], [2, 3]], [[4, 5], [6, 7]]] if name == "apart" else [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]
        )
        update(worker, chosen, 0, order)
        out[name] = weights(worker)
    return out


def unequal(config, rank, port):
    """One rank's completion is longer than a chunk of logits and the other's is not, and no weight stays
    gathered."""
    from transformers import AutoModelForImageTextToText

    from trainer.learning.zero.setup import GATHERS

    lengths = [int(n) for n in config.run.name.split("-")]
    # not sharded yet
    plain = AutoModelForImageTextToText.from_pretrained(config.model.path, dtype=torch.float32)
    config = replace(config, method="sft", optimizer=replace(config.optimizer, live_parameters=0))
    worker = start(config, rank, port)
    worker.policy.config = replace(config, method="grpo")
    head = worker.policy.trained.module.model.lm_head
    head.limit = 1024 * len(head.banned)
    g = torch.Generator().manual_seed(0)
    allowed = [i for i in range(200) if i not in worker.prompter.banned_token_ids()]
    traces = []
    for row, n in enumerate(lengths):
        completion = [allowed[int(k)] for k in torch.randint(0, len(allowed), (n,), generator=g)]
        traces.append(trace(row, worker.prompt_ids(row), completion))
    items = trainable(traces, [1.0] * len(traces))
    out: dict = {"forward": [], "backward": []}
    for _ in range(2):
        before = GATHERS.calls
        (found,) = worker.logprobs([[traces[rank]]])["old"]
        out["forward"].append(GATHERS.calls - before)
        before, stats = (
            GATHERS.calls,
            worker.update([items.pick([rank])], sum(lengths), 2, config.algorithm.kl_coef),
        )
        out["backward"].append(GATHERS.calls - before)
        if "gap" not in out:
            prompt = worker.reader.encoded(config.train_split, rank)
            ids = torch.from_numpy(traces[rank].tokens.astype(np.int64))[None]
            images = (
                {}
                if prompt.grid_thw is None
                else {
                    "pixel_values": prompt.pixel_values,
                    "image_grid_thw": prompt.grid_thw,
                    "mm_token_type_ids": (ids == worker.prompter.image_token_id).int(),
                }
            )
            with torch.no_grad():
                logits = plain(input_ids=ids, **images).logits[0, len(prompt.token_ids) - 1 : -1]
            want = logits.log_softmax(-1).gather(1, ids[0, len(prompt.token_ids) :, None])[:, 0]
            out["gap"] = float((torch.from_numpy(found) - want).abs().max())
    return out | {"norm": stats["grad/norm"]}


def gradients(config, rank, port):
    """Full gradients of an update, as ZeRO-3 has reduced them, against the padded computation of one
    process."""
    from deepspeed.utils import safe_get_full_grad
    from transformers import AutoConfig

    from tests.learning import plain

    config = replace(config, method="sft", optimizer=replace(config.optimizer, max_grad_norm=0.0))
    encoded = plain.prompts(AutoConfig.from_pretrained(config.model.path))
    items = plain.items(encoded)
    theirs = plain.padded_gradients(config.model.path, encoded, items)[1]  # before models come sharded
    out = {}
    for budget in (1, 150, 100_000):
        worker = start(config, rank, port)
        worker.policy.config = replace(config, method="grpo")
        worker.reader.encoded = lambda split, row: encoded[row]
        engine, ours = worker.policy.trained, {}
        step = engine.step

        def stepping(engine=engine, step=step, ours=ours, worker=worker):
            if engine.is_gradient_accumulation_boundary():
                for name, p in worker.policy.weights.names.items():
                    ours[name] = safe_get_full_grad(p).float()
            step()

        engine.step = stepping
        stats = update(worker, items, budget)
        out[str(budget)] = (*plain.differences(ours, theirs), stats["perf/passes"])
    return out


def undistilled(config, rank, port):
    """How far the teacher is from the policy before the first update, on fixed completions."""
    from trainer.algorithm.credit import teacher_metrics

    worker = OneRank(config)
    worker.process.set_rank(rank, rank, "127.0.0.1", port)
    worker.learner.start(10)
    items = fixed_items(worker)
    scored = worker.logprobs([items.traces], reference=True)
    return {"tokens": items.tokens} | teacher_metrics(scored["reference"], scored["old"])


def exported(config, rank, port):
    """vLLM as its users load it from disk, before any sync, against the policy; and the policy's weights."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from trainer.weights import in_process

    class FromFiles(DefaultModelLoader):
        def __init__(self, load_config):
            super().__init__(replace(load_config, load_format="auto"))

    in_process.NoWeights = FromFiles
    worker = start(config, rank, port)
    samples = worker.sample([Prompt(group=0, row=0, seed=7)], 2, config.rollout.temperature, 16)
    return {"gap": gaps(worker, samples), "weights": weights(worker)}


def moving(config, rank, port):
    """The same updates with the states moved to the host and back before each, and without; and the
    constants."""
    from trainer.learning.zero import setup as zero

    out: dict = {}
    for name in ("kept", "moved"):
        worker = start(replace(config, method="sft"), rank, port)
        worker.policy.config = replace(config, method="grpo")
        worker.policy.states.moves = name == "moved"  # on CPU too: another piece of the same memory
        for _ in range(3):
            worker.policy.states.offload()
            away = shard_sums(worker)
            list(worker.policy.weights.groups(1 << 20))
            worker.policy.states.reload()
            assert shard_sums(worker) == away
            stats = update(worker, fixed_items(worker), config.algorithm.micro_batch_tokens)
        out[name] = {"norm": stats["grad/norm"], "shards": shard_sums(worker)}
    model = worker.policy.trained.module.model
    rotary = [m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)]
    out["rotary"] = [bool(torch.equal(m.inv_freq.cpu(), type(m)(m.config).inv_freq)) for m in rotary]
    out["buffers"] = sorted({b.device.type for b in worker.policy.trained.module.buffers()})
    out["linear"] = torch.nn.functional.linear is zero.LINEAR and "deepspeed" not in str(zero.LINEAR)
    return out


def accumulation(config, rank, port):
    """The gradient norm of one completion, and of the same one 64 times over, a micro-batch each."""
    worker = start(replace(config, method="sft"), rank, port)
    worker.policy.config = replace(config, method="grpo")
    item = fixed_items(worker, 1)
    return {
        "buffer": str(worker.policy.zero.grad_partitions_flat_buffer.dtype),
        "one": update(worker, item, 1)["grad/norm"],
        "many": update(worker, item.pick([0] * 64), 1)["grad/norm"],
    }


def skipping(config, rank, port):
    """An update whose gradient is not a number, between two that are sound, and a resume before the last of
    them; and what passes gather."""
    worker = start(replace(config, method="sft"), rank, port)
    worker.policy.config = replace(config, method="grpo")
    items = fixed_items(worker)
    spoiled = replace(items, advantages=[items.advantages[0] * np.float32("nan"), *items.advantages[1:]])
    out: dict = {"stats": [], "shards": []}
    for batch in (items, spoiled, items):
        before = worker.policy.shards(lambda key, tensor: tensor.detach().clone())
        out["stats"].append(update(worker, batch, config.algorithm.micro_batch_tokens))
        out["shards"].append(shard_sums(worker))
    worker.policy.load(lambda wanted: (before[name].tensors[kind] for kind, name, _, _ in wanted))
    worker.policy.loaded(2, 1)
    update(worker, items, config.algorithm.micro_batch_tokens)
    out["resumed"] = shard_sums(worker)
    sharded = [
        p for p in worker.policy.weights.names.values() if not p.ds_persist
    ]  # the small ones stay whole
    out["model_gib"] = sum(p.ds_numel for p in sharded) * 4 / 2**30
    out["update_gib"] = [update(worker, items, tokens)["perf/gathered_gib"] for tokens in (10_000, 1)]
    return out


def shard_sums(worker: OneRank) -> dict[str, list[float]]:
    """Sum and first entry of the fp32 weights and Adam's moments in every parameter's shard."""
    shards = worker.policy.shards(lambda key, tensor: tensor.detach().cpu())
    return {
        f"{name}/{kind}": [float(t.double().sum()), float(t[0]) if len(t) else 0.0]
        for name, shard in shards.items()
        for kind, t in shard.tensors.items()
    }


def sleeping(config, rank, port):
    """Three whole cycles at learning rate 0: memory awake and asleep, and what the engine holds and says each
    time."""
    worker = start(replace(config, optimizer=replace(config.optimizer, learning_rate=0.0)), rank, port)

    def used() -> float:
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30

    def checksums(model) -> dict[str, float]:
        held = [*model.named_parameters(), *model.named_buffers()]
        return {name: float(tensor.double().sum()) for name, tensor in held}

    # Five prompts of one completion: a CUDA graph of eight runs padded, with what the pool holds beyond them.
    out: dict = {"awake_gib": [], "asleep_gib": [], "checksums": [], "gaps": [], "tokens": [], "padded": []}
    for version in range(3):
        worker.sampler.load(version)
        out["checksums"].append(worker.engine.llm.apply_model(checksums)[0])
        five = worker.sample(prompts_for(worker, [0, 1, 2, 3, 4]), 1, 1.0)
        out["padded"].append(gaps(worker, five)[1])
        samples = worker.sample(prompts_for(worker, [0, 1, 2, 3]), 4, 1.0)
        out["awake_gib"].append(used())
        out["gaps"].append(gaps(worker, samples)[1])
        out["tokens"].append([token for t in samples for token in t.completion.tolist()])
        worker.engine.sleep()
        out["asleep_gib"].append(used())
        worker.sampler.rest()
        update(worker, fixed_items(worker), config.algorithm.micro_batch_tokens)
    return out


def added_later(config, rank, port):
    """The same prompts, all added before the first step, and one between two steps."""
    worker = start(config, rank, port)
    worker.sampler.load(0)
    prompts = prompts_for(worker, list(range(6)))
    out = []
    for at_once in (sys.maxsize, 1):
        worker.engine.pictures_at_once = at_once
        worker.engine.reset_caches()
        traces = worker.sample(prompts, 3, 1.0)
        out.append([[t.completion.tolist(), t.logprobs.tolist()] for t in traces])
    greedy = worker.sample(prompts, 1, 0.0)
    narrow = worker.sample(prompts, 1, 1.0, top_p=1e-6)
    return {
        "together": out[0],
        "one by one": out[1],
        "greedy": [t.completion.tolist() for t in greedy],
        "narrow": [t.completion.tolist() for t in narrow],
    }


def run(name: str, path: Path, rank: int, port: int, out: Path) -> NoReturn:
    """Writes what the scenario returns, and ends the process."""
    config = configuration.load(path)
    elsewhere = __name__ if name in globals() else f"tests.learning.rank_scripts.{name}"
    module = next((module for module, names in IN_MODULES.items() if name in names), elsewhere)
    result = getattr(importlib.import_module(module), name)(config, rank, port)
    out.write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # torch and gloo threads of a finished rank need no further ceremony
