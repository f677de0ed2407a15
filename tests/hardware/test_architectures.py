"""Models that are refused by name, before anything loads."""

import json

import pytest

from trainer.errors import ConfigError
from trainer.hardware import architectures


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as refused:
        architectures.check_path(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_gguf_file_says_how_it_becomes_a_model(tmp_path):
    assert "smollm2 --gguf FILE.gguf --out FOLDER" in refusal(str(tmp_path / "model.Q4_1.gguf"))
    (tmp_path / "model.Q4_1.gguf").touch()
    assert "set model.path to the folder" in refusal(str(tmp_path))
    # a folder that was saved from one names the format still
    plain = {"model_type": "llama", "quantization_config": {"quant_method": "gguf"}}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert "take quantization_config out of config.json" in refusal(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    architectures.check_path(str(tmp_path))


def test_an_architecture_without_a_parity_test_is_refused(tmp_path):
    assert "its experts have no parity test" in refusal("Qwen/Qwen3-VL-MoE-30B")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert "mamba is not supported (it has no parity test)" in refusal(str(tmp_path))


def test_a_mixture_of_experts_is_known_by_its_name():
    for name in ("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-VL-235B-A22B-Instruct"):
        assert "its experts have no parity test" in refusal(name)
    for name in ("Qwen/Qwen3.5-9B", "Qwen/Qwen3-8B", "Qwen/Qwen2.5-VL-3B-Instruct"):
        architectures.check_path(name)
