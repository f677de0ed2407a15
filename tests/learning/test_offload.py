"""Moving ZeRO-3's states out of the engine's way changes nothing; and what DeepSpeed does to a process is
undone."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import torch

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
    """The first move needs none; the move back waits until all are."""
    states = offload.States(SimpleNamespace(ipg_buckets={}), torch.device("cpu"))
    state = torch.arange(4.0)
    states.zero = SimpleNamespace(
        empty_partition_cache=lambda: None,
        grad_partitions_flat_buffer=torch.zeros(2),
        ipg_buckets={},
        fp32_partitioned_groups_flat=[state],
        optimizer=SimpleNamespace(state={}),
    )
    locked, may_end = [], threading.Event()

    def lock(buffer, device):
        assert device.type == "cuda"
        may_end.wait(10)
        locked.append(buffer)

    monkeypatch.setattr(offload, "lock_pages", lock)
    states.offload()
    states.device = torch.device("cuda")  # the memory of the test's "card" is the host's
    states.lock_behind()
    assert not locked
    threading.Timer(0.3, may_end.set).start()
    began = time.monotonic()
    states.device = torch.device("cpu")
    states.reload()
    assert time.monotonic() - began > 0.2 and len(locked) == 1
    assert torch.equal(state, torch.arange(4.0))
    states.lock_behind()  # nothing new
    assert states._locking is None
