"""What an engine of a model with gated delta-net layers is asked for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from trainer.config import ConfigError, override
from trainer.sampling import vllm_engine


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
