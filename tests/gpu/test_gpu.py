"""The same code on CUDA: NCCL, bf16, sleep levels 1 and 2, CUDA graphs. Also meant for torch 2.11 with vLLM 0.26."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import ROOT

THREE_B = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
"""Qwen2.5-VL-3B's text model, from its published configuration."""


@pytest.mark.parametrize("eager", [True, False])
def test_parity_in_bf16(run_ranks, gpu_config, figure, eager):
    config = replace(gpu_config, rollout=replace(gpu_config.rollout, eager=eager))
    result = run_ranks("parity", config, timeout_s=600)[0]
    mean = max(m for _, m in result["gaps"])
    figure(f"parity, bf16, {'eager' if eager else 'CUDA graphs'}: mean |log-prob difference|", mean, "nats")
    assert mean < 5e-2 and result["banned"] == 0 and result["repeat"]


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_policy_attention(run_ranks, gpu_config, figure, attention):
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn")
    config = replace(gpu_config, model=replace(gpu_config.model, attention=attention))
    mean = max(m for _, m in run_ranks("parity", config, timeout_s=600)[0]["gaps"])
    figure(f"parity, {attention}", mean, "nats")
    assert mean < 5e-2


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_a_sync_restores_the_weights(run_ranks, gpu_config, figure, level):
    config = replace(gpu_config, rollout=replace(gpu_config.rollout, sleep_level=level))
    result = run_ranks("sleeping", config, timeout_s=600)[0]
    for name in ("before_gib", "asleep_gib", "awake_gib"):
        figure(f"GPU memory used, sleep level {level}, {name.removesuffix('_gib')}", result[name], "GiB")
    assert result["asleep_gib"] < result["before_gib"] - 1
    assert result["checksums_before"] == result["checksums_after"]
    assert result["gap_after"] < 5e-2


def test_demo_learns(tmp_path, figure):
    """The demo recipe with its device set to cuda."""
    from recipes.presets import get
    from trainer import config as c

    for step in get("demo").steps:
        arguments = [a.replace("${MODELS}", str(tmp_path)).replace("${DATA}", str(tmp_path)) for a in step.args]
        subprocess.run([sys.executable, "-m", step.module, *arguments], check=True, cwd=ROOT)
    text = c.dump(get("demo").config)
    for name, value in (
        ("MODELS", tmp_path),
        ("DATA", tmp_path),
        ("RUNS", tmp_path),
        ("RUN_ID", "demo"),
        ("BUCKET", ""),
    ):
        text = text.replace("${" + name + "}", str(value))
    path = tmp_path / "run.yaml"
    path.write_text(text)
    command = [sys.executable, "-m", "trainer.grpo", "--config", str(path), "--set", "placement.device=cuda"]
    subprocess.run([*command, "--set", "placement.workers_per_node=1"], check=True, cwd=ROOT, timeout=900)
    lines = [json.loads(x) for x in (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()]
    scores = [x["eval/accuracy"] for x in lines if "eval/accuracy" in x]
    figure("demo: held-out accuracy before", scores[0], "")
    figure("demo: held-out accuracy after", scores[-1], "")
    assert scores[-1] > scores[0] + 0.2


def test_three_billion_parameters(tmp_path, tiny_model, mixed_dataset, gpu_config, figure):
    """A 3B-shaped model on random weights for a few steps: phases, and peak memory against the plan."""
    import torch
    from transformers import AutoConfig, AutoProcessor, Qwen2_5_VLForConditionalGeneration

    shape = AutoConfig.from_pretrained(tiny_model)
    for key, value in THREE_B.items():
        setattr(shape.text_config, key, value)
    shape.text_config.layer_types = ["full_attention"] * shape.text_config.num_hidden_layers
    shape.vision_config.out_hidden_size = shape.text_config.hidden_size
    shape.dtype = "bfloat16"
    model = Qwen2_5_VLForConditionalGeneration(shape).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "3b")
    AutoProcessor.from_pretrained(tiny_model).save_pretrained(tmp_path / "3b")
    del model
    from trainer import config as c

    config = c.override(
        gpu_config,
        [f"model.path={tmp_path / '3b'}", "run.max_steps=4", "rollout.prompts_per_step=16", "rollout.max_tokens=512",
         "rollout.samples_per_prompt=8", "model.gradient_checkpointing=true", "checkpoint.every_steps=1000"],
    )  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(c.dump(config))
    subprocess.run([sys.executable, "-m", "trainer.grpo", "--config", str(path)], check=True, cwd=ROOT, timeout=1500)
    last = json.loads(Path(config.run.dir, "metrics.jsonl").read_text().splitlines()[-1])
    for phase in ("rollout", "update", "sync", "step"):
        figure(f"3B shape: {phase}", last[f"time/{phase}_s"], "s")
    figure("3B shape: rollout", last["perf/rollout_tokens_per_s"], "tokens/s")
    figure("3B shape: training", last["perf/train_tokens_per_s"], "tokens/s")
    figure("3B shape: peak memory of the policy", last["perf/peak_memory_gib"], "GiB")
