"""Moving ZeRO-3's states out of the engine's way changes nothing; and what DeepSpeed does to a process is
undone."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import torch

from trainer.checkpoint import staging
from trainer.learning.zero import offload


def test_moving_states_away_and_back_changes_nothing(run_ranks, small_config):
    config = replace(
        small_config,
        model=replace(small_config.model, dtype="bf16"),
        placement=replace(small_config.placement, workers_per_node=1),
    )
    result = run_ranks("moving", config)[0]
    assert result["moved"] == result["kept"]
    assert any(
        abs(total) > 0 for name, (total, _) in result["kept"]["shards"].items() if name.endswith("/exp_avg")
    )
    assert len(result["rotary"]) == 2 and all(result["rotary"])  # zero.Init would round them to bf16
    assert result["linear"]  # vLLM compiles calls of it in the same process


def test_pages_are_locked_while_the_engine_samples(monkeypatch):
    """The weights', and those of the moments that the first update will make. The first move needs none; the
    move back waits for what it moves."""
    card = torch.device("cuda", 0)
    weights = torch.arange(4.0)
    optimizer = SimpleNamespace(state={})
    states = offload.OffloadedStates(SimpleNamespace(), torch.device("cpu"))
    states.zero = SimpleNamespace(
        empty_partition_cache=lambda: None,
        grad_partitions_flat_buffer=torch.zeros(2),
        ipg_buckets={},
        fp32_partitioned_groups_flat=[weights],
        optimizer=optimizer,
    )
    locked, may_end = [], threading.Event()

    def lock(pages, tensor, device):
        assert device is card
        may_end.wait(10)
        locked.append(tensor.data_ptr())

    monkeypatch.setattr(staging, "LARGE", 1)
    monkeypatch.setattr(staging.HostPages, "lock", lock)
    states._memory.like(("master", 0), weights, card)  # as if the weights lay on a card
    states.offload()
    host = weights.data_ptr()
    states.device = card
    states.lock_behind()
    assert not locked
    threading.Timer(0.3, may_end.set).start()
    began = time.monotonic()
    states.device = torch.device("cpu")
    states.reload()
    assert time.monotonic() - began > 0.2 and locked[0] == host
    assert torch.equal(weights, torch.arange(4.0))

    optimizer.state[weights] = {"step": 1, "exp_avg": weights + 10, "exp_avg_sq": weights + 20}
    states.offload()
    moments = [optimizer.state[weights][name].data_ptr() for name in offload.MOMENTS]
    assert locked == [host, *moments], "the first move of the moments finds memory that is touched and locked"
    states.reload()
    assert torch.equal(optimizer.state[weights]["exp_avg_sq"], torch.arange(4.0) + 20)
