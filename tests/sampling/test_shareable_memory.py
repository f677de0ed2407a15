"""GPU memory while an engine of several GPUs is built: vLLM's all-reduce shares it between processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm

from trainer import config as c
from trainer.ranks import environment
from trainer.sampling import vllm_engine

read: Any = torch._C._accelerator_getAllocatorSettings
write: Any = torch._C._accelerator_setAllocatorSettings


@pytest.fixture
def of_a_rank(monkeypatch):
    """The allocator's settings of a rank on a GPU, as torch takes them, and an engine that notes them."""
    before = read()
    write(environment.allocator_setting())
    built: list[str] = []
    monkeypatch.setattr(vllm_engine, "LLM", lambda **asked: built.append(read()))
    monkeypatch.setattr(vllm_engine, "engine_arguments", lambda *asked: {})
    yield built
    write(before)


@pytest.mark.parametrize("ranks, expands", [(1, "True"), (2, "False")])
def test_an_engine_of_several_gpus_is_built_in_memory_that_others_can_map(of_a_rank, ranks, expands):
    """Without expandable segments, with all else unchanged, and with them again for the policy's passes."""
    config = c.RunConfig(rollout=c.Rollout(tensor_parallel=ranks), placement=c.Placement(device="cuda"))
    prompter: Any = SimpleNamespace(eos_token_id=0, image_token_id=None, reply_text=None)
    vllm_engine.Engine(config, prompter, 0)
    assert of_a_rank == [environment.allocator_setting().replace("segments:True", f"segments:{expands}")]
    assert read() == environment.allocator_setting()


def test_this_vllm_shares_the_buffers_of_cuda_graphs_and_takes_no_care_itself():
    """A version that does, or that shares them in another way, must show here."""
    source = Path(vllm.__file__).parent / "distributed/device_communicators/custom_all_reduce.py"
    text = source.read_text()
    assert "ops.get_graph_buffer_ipc_meta(self._ptr)" in text and "expandable" not in text
