"""What one rank measures: seconds of updates, syncs and generating, and of vLLM alone on the same prompts."""

from __future__ import annotations

import os
import time

import torch

from tests.learning.loads import FEW, MANY
from tests.learning.one_rank import OneRank, trace, trainable
from trainer.algorithm.batching import TrainBatch
from trainer.algorithm.traces import Prompt, Trace
from trainer.hardware import flops, model_shapes

RATED = {"rows": 32, "samples": 8, "pack": 4096, "packs": 8}
UPDATES = 10


def packed(worker: OneRank) -> tuple[TrainBatch, int, flops.PhaseFlops]:
    """A row of completions that share no prompt, their number, and the work of RATED["packs"] such rows."""
    config = worker.config
    traces: list[Trace] = []  # of different rows: no prompt is shared, and none counted twice
    for row in range(RATED["rows"]):
        prompt = worker.prompt_ids(row % len(worker.train_set))
        used = sum(len(t.tokens) for t in traces)
        if not traces or used + len(prompt) + config.rollout.max_tokens <= RATED["pack"]:
            answer = [i % 200 for i in range(config.rollout.max_tokens)]
            traces.append(trace(row % len(worker.train_set), prompt, answer))
    shape = model_shapes.from_config(worker.prompter.hf_config.to_dict())
    sequences = [
        flops.CompletedSequence(
            t.shared,
            len(t.completion),
            flops.image_grids(t.prompt.tolist(), worker.prompter.image_token_id or -1),
        )
        for t in traces
    ] * RATED["packs"]
    work = flops.train_flops(
        shape, sequences, config.model.gradient_checkpointing, config.model.freeze_vision
    )
    return trainable(traces, [1.0] * len(traces)), len(sequences), work


def alone(config, rank, port):
    """A policy without an engine: seconds of ten updates of full packs, of its states' way to the host and
    back, and of a first save; GiB that it took at most."""
    worker = OneRank(config)
    worker.process.set_rank(rank, rank, "127.0.0.1", port)
    worker.learner.start(UPDATES)
    worker.learner.forget_peak()
    row, sequences, work = packed(worker)
    rows = [row] * RATED["packs"]

    def seconds(call) -> float:
        started = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started

    updates: list[float] = []
    for _ in range(UPDATES):
        updates.append(seconds(lambda: worker.update(rows, row.tokens * len(rows), sequences, 0.0)))
    out: dict = {"updates": updates, "model_flops": work.model, "hardware_flops": work.hardware}
    if torch.cuda.is_available():
        out["gib"] = torch.cuda.max_memory_allocated() / 2**30
    out["away"] = seconds(worker.policy.states.offload)
    out["back"] = seconds(worker.policy.states.reload)
    if config.checkpoint.every_steps <= UPDATES:
        out["save"] = seconds(lambda: worker.learner.save(1, [], False, "first"))
        out["written"] = out["save"] + seconds(worker.learner.writer.wait)
    return out


def rates(config, rank, port):
    """Seconds of an update of full packs, of a sync, and of generating; the second time, when all is
    compiled."""
    worker = OneRank(config).start(rank, port)
    rows = [row % len(worker.train_set) for row in range(RATED["rows"])]
    items, sequences, work = packed(worker)
    prompts = [Prompt(group=i, row=row, seed=i) for i, row in enumerate(rows)]
    tokens = items.tokens * RATED["packs"]
    out: dict = {"model_flops": work.model, "hardware_flops": work.hardware, "seconds": {}}

    def timed(name, call):
        started = time.perf_counter()
        result = call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        out["seconds"][name] = time.perf_counter() - started  # the last time counts
        return result

    for version in range(2):
        timed("sync", lambda version=version: worker.sampler.load(version))
        samples = timed("rollout", lambda: worker.sample(prompts, RATED["samples"], 1.0))
        worker.sampler.rest()
        timed("update", lambda: worker.update([items] * RATED["packs"], tokens, sequences, 0.0))
    return out | {"tokens": sum(len(t.completion) for t in samples)}


def bare(config, rank, port):
    """The same prompts by vLLM as its users call it: no seeds, no log-probabilities, no ban, no weight
    sync."""
    # Its start would compile a sampler of top-p, which takes minutes and headers of all of CUDA.
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    from vllm import LLM, SamplingParams

    worker = OneRank(config)
    on_gpu, r = config.placement.device == "cuda", config.rollout
    memory = (
        {"gpu_memory_utilization": r.gpu_memory_utilization}
        if on_gpu
        else {"kv_cache_memory_bytes": int(r.kv_cache_gib * 2**30)}
    )
    llm = LLM(
        model=config.model.path,
        dtype="bfloat16" if config.model.dtype == "bf16" else "float32",
        max_model_len=config.data.prompt_max_tokens + r.max_tokens,
        generation_config="vllm",
        enforce_eager=not on_gpu,
        **memory,
    )
    rows = [row % len(worker.train_set) for row in range(RATED["rows"])]
    inputs = [worker.reader.request(config.train_split, row).inputs for row in rows]
    params = SamplingParams(n=RATED["samples"], temperature=1.0, max_tokens=r.max_tokens)
    for _ in range(2):
        started = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": sum(len(c.token_ids) for o in outputs for c in o.outputs)}


def decoding(config, rank, port):
    """Seconds of a decode step with few sequences and with many, the second time each; and the tokens that
    the engine's cache holds."""
    worker = OneRank(config).start(rank, port)
    worker.sampler.load(0)
    seconds = {}
    for sequences in (FEW, MANY):
        rows = [row % len(worker.train_set) for row in range(sequences // 8)]
        prompts = [Prompt(group=i, row=row, seed=i) for i, row in enumerate(rows)]
        for _ in range(2):
            started = time.perf_counter()
            traces = worker.sample(prompts, 8, 1.0)
            took = time.perf_counter() - started
        longest = max(len(t.completion) for t in traces)
        seconds[sequences] = took / longest
    cache = worker.engine.llm.llm_engine.vllm_config.cache_config
    return {
        "few": seconds[FEW],
        "many": seconds[MANY],
        "cache_tokens": cache.num_gpu_blocks * cache.block_size,
    }


def communicators(config, rank, port):
    """GiB of this rank's GPU that four communicators take: of all ranks, of vLLM's world, of its
    tensor-parallel ranks, and its own beside torch's."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    data = torch.ones(1 << 24, device=device)

    def used() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    before = used()
    torch.distributed.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=config.placement.world_size,
        device_id=device,
    )
    groups = [None, *(torch.distributed.new_group() for _ in range(3))]
    for group in groups:
        torch.distributed.all_reduce(data, group=group)
    torch.cuda.synchronize()
    return {"gib": (used() - before) / 2**30}


def context(config, rank, port):
    """GiB of a GPU that a process takes before its model: CUDA's context and the workspaces of matrix
    products."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(rank)
    before = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    matrix = torch.ones(4096, 4096, device=torch.device("cuda", rank), dtype=torch.bfloat16)
    (matrix @ matrix).sum().item()
    torch.cuda.synchronize()
    own = torch.cuda.memory_reserved()
    return {"gib": (pynvml.nvmlDeviceGetMemoryInfo(handle).used - before - own) / 2**30}
