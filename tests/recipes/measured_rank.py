"""One rank that measures itself: `python measured_rank.py config.yaml RANK PORT OUT`. Not a test itself.

Anonymous memory (tensors and the interpreter's heap; no program code) over what the process takes without a
model: when model and optimizer stand, between steps, and the peaks of a pass without gradients, of forward
and backward, and of the optimizer's step. The caller sets MALLOC, so that freed tensors leave at once and
what is resident is what is live.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

from tests.learning.one_rank import OneRank, trace, trainable
from trainer import config as configuration
from trainer.algorithm.batching import TrainBatch, trace_length
from trainer.algorithm.scheduling import schedule_passes

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
"""glibc keeps freed blocks of up to 32 MiB for later, which is no need of the model's."""
PAGE = os.sysconf("SC_PAGESIZE")


def resident() -> int:
    """Bytes of anonymous memory of this process now."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * PAGE


def settled() -> int:
    """The same after giving back what is free."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident()


class Peaks(threading.Thread):
    """Notes the peak of every phase, a thousand times a second."""

    def __init__(self, phase: str) -> None:
        super().__init__(daemon=True)
        self.phase = phase
        self.over = False
        self.found = dict[str, int]()
        self.start()

    def run(self) -> None:
        while not self.over:
            phase = self.phase
            self.found[phase] = max(self.found.get(phase, 0), resident())
            time.sleep(0.001)

    def close(self) -> dict[str, int]:
        self.over = True
        self.join()
        return self.found


def items(worker: OneRank, count: int, tokens: int) -> TrainBatch:
    """Rows with answers that fill them up to `tokens`."""
    traces = []
    for row in range(count):
        prompt = worker.prompt_ids(row)
        n = tokens - len(prompt)
        traces.append(trace(row, prompt, [100 + i % 50 for i in range(n)], logprobs=[-5.0] * n))
    return trainable(traces, [1.0] * count)


def batches(worker: OneRank, tokens: int) -> tuple[list[TrainBatch], int, int]:
    """This rank's micro-batches of one step, and the tokens and sequences of all ranks."""
    config = worker.config
    world = config.placement.world_size
    size = world * config.algorithm.micro_batch_tokens // tokens
    batch = items(worker, size, tokens)
    plan = schedule_passes(
        [trace_length(t, -1) for t in batch.traces], world, config.algorithm.micro_batch_tokens
    )
    return [batch.pick(members) for members in plan[worker.rank]], batch.tokens, size


def main(path: str, rank: int, port: int, out: str) -> None:
    config = configuration.load(path)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(config.placement.world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLForConditionalGeneration  # noqa: F401

    import trainer.learning.policy  # noqa: F401
    from trainer.data.processor import Prompter

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as `init_distributed` says
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    torch.distributed.all_reduce(torch.ones(1))
    # the libraries' own buffers
    (torch.ones(256, 256, requires_grad=True) @ torch.ones(256, 256)).sum().backward()
    warm = Prompter(config.model)
    worker = OneRank(config)
    before = settled()
    worker.start(rank, port)
    found = {"load": settled()}
    mine, tokens, size = batches(worker, config.sft.max_tokens)
    images = [
        worker.reader.encoded(config.train_split, t.row).pixel_values for micro in mine for t in micro.traces
    ]
    patches = sum(len(pixels) for pixels in images if pixels is not None)
    worker.update(mine, tokens, size, 0.0)  # Adam's moments, and the pages of the buckets
    found["save"] = settled()
    step = worker.policy.trained.step
    peaks = Peaks("update")

    def measured_step() -> None:
        peaks.phase = "optimizer step"
        step()

    worker.policy.trained.step = measured_step
    worker.update(mine, tokens, size, 0.0)
    peaks.phase = "between"
    settled()
    peaks.phase = "logprobs"
    # The first after an update takes most: DeepSpeed keeps the layers for a backward pass.
    worker.logprobs([micro.traces for micro in mine])
    passes = peaks.close()
    found |= {name: passes[name] for name in ("update", "optimizer step", "logprobs")}
    del warm
    over = {name: value - before for name, value in found.items()}
    Path(out).write_text(json.dumps(over | {"patches": patches}))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
