"""The engine's parts that need no engine, and how prompts join a running one."""

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm

from trainer import config as c
from trainer.config import ConfigError, override
from trainer.ranks import environment
from trainer.sampling import vllm_engine
from trainer.sampling.engine_mends import zero_scratch


def test_the_ban_fits_both_model_runners_and_keeps_no_tensor():
    """V1 serves CPUs, V2 GPUs; tensors made while the engine loads are lost at sleep level 2."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorV2

    from trainer.sampling.vllm_engine import BanTokens

    assert issubclass(BanTokens, LogitsProcessor) and issubclass(BanTokens, ProcessorV2)
    config: Any = SimpleNamespace(additional_config={"banned_token_ids": [0, 1, 4, 6]})
    v1, v2 = BanTokens(config, torch.device("cpu"), False), BanTokens(config, SimpleNamespace())
    assert v2.add_request(0, SimpleNamespace())  # it wants to see the logits of every request
    for logits in (v1.apply(torch.zeros(2, 8)), v2.apply(torch.zeros(2, 8), SimpleNamespace())):
        assert logits.isinf().nonzero().tolist() == [[row, i] for row in range(2) for i in (0, 1, 4, 6)]
    assert not any(isinstance(value, torch.Tensor) for value in vars(v1).values())


def test_ranges_join_neighbours():
    from trainer.sampling.vllm_engine import id_ranges

    assert (
        id_ranges([]) == []
        and id_ranges([7]) == [(7, 8)]
        and id_ranges([1, 2, 3, 9, 11, 12]) == [(1, 4), (9, 10), (11, 13)]
    )


@pytest.mark.long
def test_what_gpus_are_measured_by_runs_here_too(run_ranks, small_config):
    """tests/gpu's rates, on the tiny model: both engines answer the same prompts, and every figure is
    there."""
    config = replace(
        small_config,
        placement=replace(small_config.placement, workers_per_node=1),
        rollout=replace(small_config.rollout, max_tokens=64),
    )
    ours, bare = run_ranks("rates", config)[0], run_ranks("bare", config)[0]
    assert set(ours["seconds"]) == {"sync", "rollout", "update"} and min(ours["seconds"].values()) > 0
    assert ours["tokens"] > 0.8 * 32 * 8 * 64 and bare["tokens"] > 0.8 * 32 * 8 * 64
    # Two products per parameter and token forward, twice that backward; some 4,096 tokens in each of 8 packs.
    parameters = 400_000  # in matrices: two layers of 147,456, and the head
    assert ours["model_flops"] > 6 * parameters * 8 * 3_000
    print(ours, bare)


def test_prompts_with_images_may_join_between_steps(run_ranks, small_config, picture_dataset):
    """An engine on a GPU takes a few at a time: the host prepares the next ones while it computes."""
    config = override(small_config, [f"data.path={picture_dataset}", "placement.workers_per_node=1"])
    result = run_ranks("added_later", config)[0]
    pairs = zip(result["together"], result["one by one"], strict=True)
    for (tokens, logprobs), (again, of_again) in pairs:
        assert tokens == again
        assert np.allclose(logprobs, of_again, atol=1e-5)
    assert result["narrow"] == result["greedy"] != [], "a top-p of almost nothing leaves the likeliest token"


V2 = Path(vllm.__file__).parent / "v1/worker/gpu"


def test_positions_and_embeddings_are_zeroed():
    rope = SimpleNamespace(positions=torch.full((3, 9), 77))
    encoder = SimpleNamespace(inputs_embeds=torch.full((9, 4), float("nan")))
    state = SimpleNamespace(rope_state=rope, encoder_runner=encoder)
    zero_scratch(SimpleNamespace(model_runner=SimpleNamespace(model_state=state)))
    assert not rope.positions.any() and not encoder.inputs_embeds.any()
    text_only = SimpleNamespace(rope_state=None, inputs_embeds=torch.ones(9, 4))
    zero_scratch(SimpleNamespace(model_runner=SimpleNamespace(model_state=text_only)))
    assert not text_only.inputs_embeds.any()
    zero_scratch(SimpleNamespace(model_runner=SimpleNamespace()))  # the runner on a CPU has no such state


def test_this_vllm_keeps_them_where_they_are_looked_for():
    """A version that moves them must show here, since no test on a CPU meets this runner."""
    assert "self.positions = torch.zeros(" in (V2 / "mm/rope.py").read_text()
    assert "self.inputs_embeds = torch.zeros(" in (V2 / "mm/encoder_runner.py").read_text()
    state = (V2 / "model_states/default.py").read_text()
    assert "self.rope_state = get_rope_state(" in state and "self.encoder_runner" in state
    assert "self.model_state = init_model_state(" in (V2 / "model_runner.py").read_text()


def test_gated_delta_layers_are_sampled_in_bf16_on_a_cpu(small_config):
    with pytest.raises(ConfigError, match="set model.dtype to bf16"):
        vllm_engine._of_gated_delta(small_config)
    asked = vllm_engine._of_gated_delta(override(small_config, ["model.dtype=bf16"]))
    assert asked == {"mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": False}


def test_an_engine_on_a_gpu_computes_prompts_by_the_kernel_that_was_compared(small_config):
    asked = vllm_engine._of_gated_delta(override(small_config, ["model.dtype=bf16", "placement.device=cuda"]))
    assert asked["gdn_prefill_backend"] == "triton"


@pytest.mark.parametrize(
    ("gated", "capability", "why"),
    [
        (True, (9, 0), "gated delta-net"),
        (False, (8, 0), "Hopper or newer, and this is a card"),
        (False, (9, 0), ""),
    ],
)
def test_repeatable_kernels_are_refused_where_vllm_has_none(monkeypatch, gated, capability, why):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    prompter = SimpleNamespace(architecture=SimpleNamespace(gated_delta=gated))
    with pytest.raises(ConfigError, match=why) if why else contextlib.nullcontext():
        vllm_engine._check_deterministic(prompter)  # ty: ignore[invalid-argument-type]


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
