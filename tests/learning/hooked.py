"""How often ZeRO-3's hooks run on a rank in one update. Runs inside scenarios.py; not a test itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from tests.learning.one_rank import OneRank, lessons, trace
from trainer.learning.blocks import blocks_of


def hooked(config, rank, port):
    """Fetches of weights in the third update, when DeepSpeed knows the order of modules."""
    worker = OneRank(replace(config, method="sft")).start(rank, port)
    worker.policy.config = replace(config, method="grpo")
    found = blocks_of(worker.policy.trained.module.model)
    own = {id(block) for block in found}
    within = {id(module) for block in found for module in block.modules()} - own
    items = lessons([trace(row, worker.prompt_ids(row), [101, 102, 103]) for row in range(8)], [1.0] * 8)
    for _ in range(2):
        worker.step(items, config.algorithm.micro_batch_tokens)

    coordinator: Any = PartitionedParameterCoordinator
    fetch = coordinator.fetch_sub_module
    fetched: Counter[str] = Counter()

    def counted(self: Any, module: Any, forward: bool) -> Any:
        kind = "of_blocks" if id(module) in own else "within" if id(module) in within else "others"
        fetched[kind] += 1
        return fetch(self, module, forward)

    coordinator.fetch_sub_module = counted
    stats = worker.step(items, config.algorithm.micro_batch_tokens)
    counts = {kind: fetched[kind] for kind in ("of_blocks", "within", "others")}
    outside = len(list(worker.policy.trained.module.modules())) - len(own) - len(within)
    return counts | {"blocks": len(found), "outside": outside, "passes": stats["perf/passes"]}
