"""What one rank does in a test: `python scenarios.py NAME config.yaml RANK PORT OUT`. Not a test itself."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from trainer import config as configuration
from trainer.algorithm.batching import TrainItem, schedule
from trainer.algorithm.records import Prompt
from trainer.engine.gpu_worker import Worker


def start(config, rank, port) -> Worker:
    worker = Worker(config)
    worker.start(rank, rank, "127.0.0.1", port, 10)
    return worker


def prompts_for(worker: Worker, rows: list[int]) -> list[Prompt]:
    return [Prompt(group=i, row=row, seed=1000 + row) for i, row in enumerate(rows)]


def gaps(worker: Worker, samples) -> list[float]:
    """Largest and mean |log-prob difference| of engine and policy on the engine's own samples."""
    batch = worker._collate([(s.row, s.prompt_token_ids, s.token_ids) for s in samples])
    gap = (worker.policy.logprobs([batch])[0] - torch.tensor([x for s in samples for x in s.logprobs])).abs()
    return [float(gap.max()), float(gap.mean())]


def fixed_items(worker: Worker, count: int = 8) -> list[TrainItem]:
    """Answers that do not depend on any engine, of unequal lengths, with pictures and without."""
    g = torch.Generator().manual_seed(0)
    allowed = [i for i in range(200) if i not in worker.prompter.banned_token_ids()]
    items = []
    for i in range(count):
        n = int(torch.randint(2, 12, (1,), generator=g))
        answer = [allowed[int(k)] for k in torch.randint(0, len(allowed), (n,), generator=g)]
        prompt = worker._prompt(i).token_ids
        items.append(TrainItem(i, prompt, answer, float(torch.randn(1, generator=g)), [-5.0] * n))
    return items


def update(worker: Worker, items: list[TrainItem], micro_batch: int, order=None) -> dict[str, float]:
    plan = schedule([i.length for i in items], worker.config.placement.world_size, micro_batch)
    if order:
        plan = order
    mine = [[items[i] for i in micro] for micro in plan[worker.rank]]
    return worker.update(mine, sum(len(i.token_ids) for i in items), len(items))


def weights(worker: Worker) -> dict[str, list[float]]:
    """A few entries and the sum of every full parameter."""
    out = {}
    for group in worker.policy.weight_groups(1 << 30):
        for name, tensor in group:
            flat = tensor.double().flatten()
            out[name] = [float(flat.sum()), float(flat.square().sum()), *map(float, flat[:3])]
    return out


def parity(config, rank, port):
    """Engine against policy before and after updates; bans; determinism."""
    worker = start(config, rank, port)
    out: dict = {"gaps": []}
    rows = [0, 1, 2, 3]
    for version in range(3):
        worker.sync(version)
        samples = worker.generate(prompts_for(worker, rows), 4, config.rollout.temperature)
        out["gaps"].append(gaps(worker, samples))
        worker.prepare_update()
        update(worker, fixed_items(worker), config.algorithm.micro_batch)
    out["stale"] = gaps(worker, samples)
    worker.sync(3)

    def ask(order, temperature=1.0, n=2):
        found = worker.generate(prompts_for(worker, order), n, temperature)
        return sorted([s.row, s.index, s.token_ids, s.logprobs] for s in found)

    first, again, reversed_ = ask(rows), ask(rows), ask(rows[::-1])
    out |= {"repeat": first == again, "reversed": [x[:3] for x in first] == [x[:3] for x in reversed_]}
    hot = ask(list(range(16)), temperature=2.0, n=16)
    tokens = [t for x in hot for t in x[2]]
    banned = set(worker.prompter.banned_token_ids())
    out |= {"sampled": len(tokens), "banned": sum(t in banned for t in tokens), "distinct": len(set(tokens))}
    out["vocabulary"] = len(worker.prompter.tokenizer)
    return out


def invariance(config, rank, port):
    """The same step by several micro-batch sizes: metrics, gradient norm and resulting weights."""
    config = replace(config, method="sft")  # no engine
    out = {}
    for micro in (1, 2, 4):
        if 8 % (micro * config.placement.world_size):
            continue
        worker = start(config, rank, port)
        worker.policy.config = replace(config, method="grpo")
        stats = update(worker, fixed_items(worker), micro)
        out[str(micro)] = {"stats": stats, "weights": weights(worker)}
    return out


def imageless(config, rank, port):
    """All pictures on one rank, none on the other: must not hang, and must equal the mixed order."""
    config = replace(config, method="sft")
    out = {}
    for name in ("mixed", "apart"):
        worker = start(config, rank, port)
        items = fixed_items(worker, 12)
        text = [i for i, item in enumerate(items) if not worker.train_set[item.row].images][:4]
        seen = [i for i, item in enumerate(items) if worker.train_set[item.row].images][:4]
        chosen = [items[i] for i in text + seen]
        order = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]] if name == "apart" else [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]
        update(worker, chosen, 2, order)
        out[name] = weights(worker)
    return out


def elastic(config, rank, port):
    """Takes over a checkpoint if there is one, updates once, and shows the weights; saves first where asked."""
    from trainer.checkpoint.manager import open_folder

    config = replace(config, method="sft")
    worker = start(config, rank, port)
    folder = os.environ.get("RESUME_FROM")
    if folder:
        found = open_folder(folder)
        worker.load(found)
        worker.loaded(found.state["updates"])
    update(worker, fixed_items(worker), 2)
    return {"weights": weights(worker), "updates": worker.policy.updates}


def exported(config, rank, port):
    """The engine as it loads from disk, before any sync, against the policy; and the policy's weights."""
    worker = start(config, rank, port)
    return {"gap": worker.probe(range(len(worker.train_set)))["max"], "weights": weights(worker)}


def moving(config, rank, port):
    """The same updates with the states moved to the host and back before each, and without; and the constants."""
    from trainer.engine import policy

    out: dict = {}
    for name in ("kept", "moved"):
        worker = start(replace(config, method="sft"), rank, port)
        worker.policy.config = replace(config, method="grpo")
        worker.policy._moves = name == "moved"  # on CPU too: another piece of the same memory
        for _ in range(3):
            worker.policy.offload()
            away = shard_sums(worker)
            list(worker.policy.weight_groups(1 << 20))
            worker.policy.reload()
            assert shard_sums(worker) == away
            stats = update(worker, fixed_items(worker), config.algorithm.micro_batch)
        out[name] = {"norm": stats["grad/norm"], "shards": shard_sums(worker)}
    model = worker.policy.engine.module.model
    rotary = [m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)]
    out["rotary"] = [bool(torch.equal(m.inv_freq.cpu(), type(m)(m.config).inv_freq)) for m in rotary]
    out["buffers"] = sorted({b.device.type for b in worker.policy.engine.module.buffers()})
    out["linear"] = torch.nn.functional.linear is policy.LINEAR and "deepspeed" not in str(policy.LINEAR)
    return out


def accumulation(config, rank, port):
    """The gradient norm of one answer, and of the same answer 64 times over, a micro-batch each."""
    worker = start(replace(config, method="sft"), rank, port)
    worker.policy.config = replace(config, method="grpo")
    item = fixed_items(worker, 1)
    return {
        "buffer": str(worker.policy.zero.grad_partitions_flat_buffer.dtype),
        "one": update(worker, item, 1)["grad/norm"],
        "many": update(worker, item * 64, 1)["grad/norm"],
    }


def shard_sums(worker: Worker) -> dict[str, list[float]]:
    """Of every parameter's shard: sum and first entry of fp32 weights and Adam's moments."""
    shards = worker.policy.shards(lambda key, tensor: tensor.detach().cpu())
    return {
        f"{name}/{kind}": [float(t.double().sum()), float(t[0]) if len(t) else 0.0]
        for name, shard in shards.items()
        for kind, t in shard.tensors.items()
    }


def sleeping(config, rank, port):
    """Three whole cycles at learning rate 0: memory awake and asleep, and what the engine holds and says each time."""
    worker = start(replace(config, optimizer=replace(config.optimizer, learning_rate=0.0)), rank, port)

    def used() -> float:
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30

    def checksums(model) -> dict[str, float]:
        held = [*model.named_parameters(), *model.named_buffers()]
        return {name: float(tensor.double().sum()) for name, tensor in held}

    out: dict = {"awake_gib": [], "asleep_gib": [], "checksums": [], "gaps": [], "tokens": []}
    for version in range(3):
        worker.sync(version)
        out["checksums"].append(worker.engine.llm.apply_model(checksums)[0])
        samples = worker.generate(prompts_for(worker, [0, 1, 2, 3]), 4, 1.0)
        out["awake_gib"].append(used())
        out["gaps"].append(gaps(worker, samples)[1])
        out["tokens"].append([t for s in samples for t in s.token_ids])
        worker.engine.sleep()
        out["asleep_gib"].append(used())
        worker.prepare_update()
        update(worker, fixed_items(worker), config.algorithm.micro_batch)
    return out


if __name__ == "__main__":
    name, path, rank, port, out = sys.argv[1:6]
    config = configuration.load(path)
    if config.placement.device == "cuda":  # one GPU each, as Ray shows them
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(rank)] if seen else rank
    result = globals()[name](config, int(rank), int(port))
    Path(out).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # torch and gloo threads of a finished rank need no further ceremony
