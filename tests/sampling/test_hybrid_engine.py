"""What an engine of a model with gated delta-net layers is asked for."""

from __future__ import annotations

import pytest

from trainer.config import ConfigError, override
from trainer.sampling import vllm_engine


def test_gated_delta_layers_are_sampled_in_bf16_on_a_cpu(small_config):
    with pytest.raises(ConfigError, match="set model.dtype to bf16"):
        vllm_engine._of_gated_delta(small_config)
    asked = vllm_engine._of_gated_delta(override(small_config, ["model.dtype=bf16"]))
    assert asked == {"mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": False}
