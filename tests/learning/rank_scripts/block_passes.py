"""How often Python runs on a rank in one update. Runs inside scenarios.py."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from dataclasses import replace
from types import FrameType
from typing import Any

from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from tests.learning.one_rank import OneRank, trace, trainable
from trainer.learning import policy
from trainer.learning.blocks import blocks_of
from trainer.learning.zero import private_names, sharded
from trainer.learning.zero.setup import GATHERS, zero_config


def block_passes(config, rank, port):
    """Gathers, DeepSpeed's fetches and Python frames in the third update, when DeepSpeed knows the order of
    modules; and a hash of what was learned. Every parameter is sharded, however small. A run that is named
    `deepspeed` meets a release of DeepSpeed that lacks a name."""

    def all_sharded(*args: Any, **kwargs: Any) -> dict[str, Any]:
        made = zero_config(*args, **kwargs)
        made["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return made

    if config.run.name == "deepspeed":
        absent = {private_names.STAGE_3: "name_of_no_release"}
        private_names.LACKING = private_names.lacking(private_names.NEEDED, absent)
    policy.zero_config = all_sharded
    worker = OneRank(replace(config, method="sft")).start(rank, port)
    worker.policy.config = replace(config, method="grpo")
    found = blocks_of(worker.policy.trained.module.model)
    inside = {id(module) for block in found for module in block.modules()}
    items = trainable([trace(row, worker.prompt_ids(row), [101, 102, 103]) for row in range(8)], [1.0] * 8)
    for _ in range(2):
        worker.step(items, config.algorithm.micro_batch_tokens)

    coordinator: Any = PartitionedParameterCoordinator
    fetch = coordinator.fetch_sub_module
    fetched: Counter[str] = Counter()
    frames: Counter[str] = Counter()

    def counted(self: Any, module: Any, forward: bool) -> Any:
        fetched["of_blocks" if id(module) in inside else "others"] += 1
        return fetch(self, module, forward)

    def seen(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            frames[frame.f_code.co_filename] += 1

    coordinator.fetch_sub_module = counted
    gathered = GATHERS.calls
    sys.setprofile(seen)
    stats = worker.step(items, config.algorithm.micro_batch_tokens)
    sys.setprofile(None)
    learned = hashlib.sha256()
    for shard in worker.policy.shards(lambda key, tensor: tensor.detach().clone()).values():
        for _, tensor in sorted(shard.tensors.items()):
            learned.update(tensor.numpy().tobytes())
    return {
        "learned": learned.hexdigest(),
        "blocks": len(found),
        "passes": stats["perf/passes"],
        "outside": len(list(worker.policy.trained.module.modules())) - len(inside),
        "of_blocks": fetched["of_blocks"],
        "others": fetched["others"],
        "gathers": GATHERS.calls - gathered,
        "frames": frames[sharded.__file__],
        "frames_of_deepspeed": sum(n for file, n in frames.items() if "deepspeed" in file),
        "whole": sum(p.numel() for block in found for p in block.parameters()),
    }
