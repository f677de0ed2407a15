"""What one rank measures: seconds of updates, syncs and generating, and of vLLM alone on the same prompts."""

from __future__ import annotations

import time

import torch

from tests.learning.one_rank import OneRank, lessons, trace
from trainer.algorithm.traces import Prompt, Trace
from trainer.hardware import flops, model_shapes

RATED = {"rows": 32, "samples": 8, "pack": 4096, "packs": 8}


def rates(config, rank, port):
    """Seconds of an update of full packs, of a sync, and of generating; the second time, when all is
    compiled."""
    worker = OneRank(config).start(rank, port)
    rows = [row % len(worker.train_set) for row in range(RATED["rows"])]
    traces: list[Trace] = []  # of different rows: no prompt is shared, and none counted twice
    for row in rows:
        prompt = worker.prompt_ids(row)
        used = sum(len(t.tokens) for t in traces)
        if not traces or used + len(prompt) + config.rollout.max_tokens <= RATED["pack"]:
            traces.append(trace(row, prompt, [i % 200 for i in range(config.rollout.max_tokens)]))
    items = lessons(traces, [1.0] * len(traces))
    shape = model_shapes.from_config(worker.prompter.hf_config.to_dict())
    sequences = [
        flops.Completed(
            t.shared,
            len(t.completion),
            flops.image_grids(t.prompt.tolist(), worker.prompter.image_token_id or -1),
        )
        for t in traces
    ] * RATED["packs"]
    work = flops.train_flops(
        shape, sequences, config.model.gradient_checkpointing, config.model.freeze_vision
    )
    prompts = [Prompt(group=i, row=row, seed=i) for i, row in enumerate(rows)]
    tokens = items.tokens * RATED["packs"]
    out: dict = {"model_flops": work.model, "seconds": {}}

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
        timed("update", lambda: worker.update([items] * RATED["packs"], tokens, len(sequences), 0.0))
    return out | {"tokens": sum(len(t.completion) for t in samples)}


def bare(config, rank, port):
    """The same prompts by vLLM as its users call it: no seeds, no log-probabilities, no ban, no weight
    sync."""
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
