"""One rank that measures itself: `python measured_rank.py config.yaml RANK PORT OUT`. Not a test itself.

Resident memory after the imports, after the model and its optimizer stand, and the peak of an optimizer step.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
from pathlib import Path

import torch

from trainer import config as configuration
from trainer.batching import TrainItem, schedule
from trainer.worker import Worker


def resident(name: str = "VmRSS") -> int:
    """VmRSS or VmHWM of this process, bytes, after giving freed memory back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def items(worker: Worker, count: int, tokens: int) -> list[TrainItem]:
    """Rows with answers that fill them up to `tokens`."""
    out = []
    for row in range(count):
        prompt = worker._prompt(row).token_ids
        n = tokens - len(prompt)
        out.append(TrainItem(row, prompt, [100 + i % 50 for i in range(n)], 1.0, [-5.0] * n))
    return out


def step(worker: Worker, tokens: int) -> None:
    config = worker.config
    size = config.placement.world_size * config.algorithm.micro_batch
    batch = items(worker, size, tokens)
    plan = schedule([i.length for i in batch], config.placement.world_size, config.algorithm.micro_batch)
    mine = [[batch[i] for i in micro] for micro in plan[worker.rank]]
    worker.update(mine, sum(len(i.token_ids) for i in batch), len(batch))


def main(path: str, rank: int, port: int, out: str) -> None:
    config = configuration.load(path)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(config.placement.world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLForConditionalGeneration  # noqa: F401

    import trainer.policy  # noqa: F401

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    torch.distributed.barrier()
    torch.ones(256, 256) @ torch.ones(256, 256)  # the matrix library's own threads and buffers
    worker = Worker(config)
    before = resident()
    worker.start(rank, rank, "127.0.0.1", port, 10)
    stands = resident()
    step(worker, config.sft.max_tokens)  # buffers that are made once
    forget_peak()
    after = resident()
    step(worker, config.sft.max_tokens)
    peak = resident("VmHWM")
    numbers = {"before": before, "stands": stands, "after": after, "peak": peak}
    Path(out).write_text(json.dumps(numbers))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
