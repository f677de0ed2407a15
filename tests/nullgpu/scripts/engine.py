"""A recipe's engine at its true widths, vocabulary, sequences and CUDA graphs, on as many ranks as it has.

engine.py RECIPE PORT [--whole] [--tokens N] [--batch N]... [key=value]...

It starts as in a run, with few layers unless `--whole`, and samples N tokens for each `--batch` of requests
(by default as many as the engine holds). Rank 0 prints a line of JSON: the start, and what an iteration takes
of the host. With NULLGPU_NCCL=alone it is the only rank, and the others are believed in.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from recipes.plan import hub_config, memory
from recipes.presets import get
from trainer import config as configuration
from trainer.hardware.model_shapes import Shape
from trainer.ranks.environment import rank_environment

ALONE = os.environ.get("NULLGPU_NCCL") == "alone"
DEPTH = 2
"""Layers of an engine whose depth is cut."""
SAMPLES = 8
"""Completions of a prompt."""
STEADY = 0.25
"""Share of a batch's iterations at its beginning and at its end that are not timed: prompts, last tokens."""


def cut(shape: Shape) -> Shape:
    """The same with few layers: of a model with gated delta nets one period of four."""
    if shape.delta:
        return replace(shape, layers=4, delta=replace(shape.delta, layers=3))
    return replace(shape, layers=DEPTH)


def play(number: int, asked: argparse.Namespace, port: int) -> None:
    """What one rank does."""
    from benchmarks.allocated import believe_in_peers, of_engine
    from tests.conftest import make_rows
    from tests.nullgpu import counts
    from trainer.algorithm.traces import Prompt
    from trainer.images.decoding import decode_image
    from trainer.learning.policy import init_distributed
    from trainer.sampling.vllm_engine import Engine

    recipe = memory.with_rows(get(asked.recipe))
    shape = hub_config.shape(recipe.config.model)
    assert shape is not None
    ranks = recipe.config.rollout.tensor_parallel
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    config, prompter = of_engine(recipe.config, shape if asked.whole else cut(shape))
    engines = recipe.config.placement.world_size // ranks
    options = [
        "rollout.eager=false",
        "placement.nodes=1",
        f"placement.workers_per_node={ranks}",
        f"rollout.prompts_per_step={-(-recipe.config.rollout.prompts_per_step // engines)}",
        "algorithm.samples_per_update=0",
        *asked.options,
    ]
    config = configuration.override(config, options)
    torch.cuda.set_device(number)
    if ALONE:
        believe_in_peers()
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=ranks)
    init_distributed("cuda")

    gc.collect()
    gc.freeze()  # as a run does: vLLM collects garbage a dozen times as it starts
    began = time.time()
    with counts.phase("start"):
        engine = Engine(config, prompter, 1)
    found: dict[str, Any] = {"start_s": round(time.time() - began, 1), "vocabulary": shape.vocabulary}
    found["graphs"] = counts.count("captured", "start")
    found["asynchronous"] = bool(engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
    rows = list(make_rows("train", 1 + max(asked.batch or [config.engine_sequences]) // SAMPLES))

    def read(prompt: Prompt) -> Any:
        row = rows[prompt.row]
        if shape.vision is None:
            row = replace(row, images=[], messages=[{"role": "user", "content": "How many are there?"}])
        return prompter.request(row, [decode_image(data, row.id) for data in row.images])

    step = engine.llm.llm_engine.step
    timed: list[tuple[float, float]] = []

    def measured() -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = step()
        timed.append((time.perf_counter() - wall, time.process_time() - cpu))
        return outputs

    engine.llm.llm_engine.step = measured
    for batch in asked.batch or [config.engine_sequences]:
        timed.clear()
        samples = min(SAMPLES, batch)
        prompts = [Prompt(group=g, row=g, seed=g) for g in range(batch // samples)]
        launches = counts.count("launch")
        with counts.phase(f"batch {batch}"):
            how = {"samples_per_prompt": samples, "temperature": 1.0, "max_tokens": asked.tokens}
            groups = list(engine.generate(prompts, read, **how))
        assert sum(map(len, groups)) == batch
        edge = int(STEADY * len(timed))
        walls, cpus = zip(*timed[edge : len(timed) - edge], strict=True)
        found[f"batch {batch}"] = {
            "iterations": len(timed),
            "wall_ms": round(1e3 * min(walls), 3),
            "cpu_ms": round(1e3 * min(cpus), 3),
            "cpu_ms_median": round(1e3 * statistics.median(cpus), 3),
            "launches": round((counts.count("launch") - launches) / len(timed), 1),
        }
    if number == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("port", type=int)
    parser.add_argument("options", nargs="*")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--batch", type=int, action="append")
    told = parser.parse_args()
    os.environ |= rank_environment(get(told.recipe).config)  # read when torch and vLLM are imported
    processes = 1 if ALONE else get(told.recipe).config.rollout.tensor_parallel
    mp.spawn(play, (told, told.port), processes)
