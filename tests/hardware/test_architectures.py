"""Models that are refused by name, before anything loads."""

import ast
import json
from pathlib import Path

import pytest

from trainer.hardware import architectures
from trainer.system.errors import ConfigError

ROOT = Path(__file__).parents[2]


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
    assert "its audio tower is not fed" in refusal("Qwen/Qwen2.5-Omni-7B")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert "mamba is not supported (it has no parity test)" in refusal(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("OpenGVLab/InternVL3_5-8B", "internvl is not supported (its images are tiles"),
        ("google/gemma-3-4b-it", "gemma3 is not supported (packed rows have neither its sliding windows"),
        ("Qwen/Qwen2.5-Omni-7B", "qwen2_5_omni is not supported (its audio tower"),
    ],
)
def test_other_families_are_refused_by_name(name, why):
    assert why in refusal(name)


def test_no_other_file_of_the_trainer_names_a_family():
    """So that a family's row is all of it; `model_shapes.py` reads sizes by it."""
    told = set(architectures.FAMILIES)
    found = set()
    for file in (ROOT / "trainer").rglob("*.py"):
        constants = {
            node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)
        }
        if told & constants:
            found.add(file.relative_to(ROOT).as_posix())
    assert found == {"trainer/hardware/architectures.py", "trainer/hardware/model_shapes.py"}


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3.5-9B",
        "Qwen/Qwen3.5-35B-A3B",
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen3-VL-235B-A22B-Instruct",
    ],
)
def test_a_name_of_a_family_that_is_trained_is_not_refused(name):
    architectures.check_path(name)


def test_experts_that_no_test_covers_are_refused(tmp_path):
    experts = {"hidden_size": 64, "moe_intermediate_size": 96, "norm_topk_prob": True}
    covered = {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []} | experts
    architectures.check_architecture("here", covered)
    for changed, message in (
        ({"decoder_sparse_step": 2}, "layers without experts"),
        ({"mlp_only_layers": [0]}, "layers without experts"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"hidden_size": 192}, "are square"),
        ({"hidden_size": 96}, "are square"),
    ):
        with pytest.raises(ConfigError, match=message):
            architectures.check_architecture("here", covered | changed)


def test_a_model_with_a_shared_expert_need_not_say_that_shares_sum_to_1():
    text = {"hidden_size": 64, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 16}
    architectures.check_architecture("here", {"model_type": "qwen3_5_moe", "text_config": text})
    with pytest.raises(ConfigError, match="norm_topk_prob"):
        architectures.check_architecture(
            "here", {"model_type": "qwen3_5_moe", "text_config": text | {"norm_topk_prob": False}}
        )
