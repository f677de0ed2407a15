import pytest

from trainer.config.run_store import model_name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
        ("Qwen/Qwen3-VL-8B-Instruct", "Qwen3-VL-8B-Instruct"),
        ("/home/me/runs/warm/hf", "warm"),
        ("runs/warm/pulled/hf", "warm"),
        ("runs/warm/checkpoints/hf/", "warm"),
        ("hf", "hf"),
    ],
)
def test_a_model_is_called_by_its_name_and_an_export_by_its_run(path, name):
    assert model_name(path) == name
