"""Options of a run on CUDA: mixtures of experts, adapters, weights in 4 bits, compiled kernels, a resume."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.gpu.conftest import changed
from trainer import config as c
from trainer.observe.history import read_history

LIMIT_S = 220
"""A check of recipes/gpu_check.py is ended a little later."""


@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 1536), (768, 2048)])
def test_grouped_products_of_experts(figure, inputs, outputs):
    """At the sizes of 30B-A3B: 128 experts of which most have no row, one has all, or none has any."""
    from trainer.learning import experts

    device = torch.device("cuda")
    few = tuple(int(number % 3 == 0) for number in range(128))
    for counts in (few, (4096, *(0,) * 127), (0,) * 128):
        wrong = experts.grouped_product_fault(inputs, outputs, counts, device, torch.bfloat16)
        empty = counts.count(0)
        figure(f"grouped products {inputs} x {outputs}, {empty} of 128 empty: right", float(not wrong), "")
        assert wrong == ""


def test_parity_of_adapters(run_ranks, gpu_config, figure):
    config = changed(gpu_config, lora={"rank": 8, "alpha": 16})
    result = run_ranks("parity", config, timeout_s=LIMIT_S)[0]
    mean = max(m for _, m in result["gaps"])
    figure("parity, adapters: mean |log-prob difference|", mean, "nats")
    assert mean < 5e-2 and result["banned"] == 0


def test_supervised_steps_on_four_bits(tmp_path, gpu_config, figure):
    """Adapters of a model in 4 bits, which no engine holds: three steps of a run without one."""
    config = changed(
        gpu_config,
        run={"dir": str(tmp_path / "run"), "max_steps": 3},
        model={"gradient_checkpointing": True},
        lora={"rank": 8, "alpha": 16, "qlora": True},
        algorithm={"kl_coef": 0.0},
        sft={"batch_size": 4, "max_tokens": 512},
    )
    path = tmp_path / "run.yaml"
    path.write_text(c.dump(replace(config, method="sft")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    subprocess.run([*command, "-m", "trainer.loops.sft", "--config", str(path)], cwd=ROOT, check=True)
    losses = [line["sft/loss"] for line in read_history(config.run.dir) if "sft/loss" in line]
    figure("adapters on 4 bits: change of the loss in three steps on cuda", losses[-1] - losses[0], "")
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_a_layer_of_four_bits(figure):
    """bitsandbytes' product and its gradient against a product with what its own weights unpack to."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import dequantize_4bit

    device = torch.device("cuda")
    torch.manual_seed(0)
    plain = torch.nn.Linear(2048, 11008, bias=False, dtype=torch.bfloat16)
    packed = bnb.nn.Linear4bit(2048, 11008, False, torch.bfloat16, True, "nf4")
    packed.load_state_dict(plain.state_dict())
    packed.to(device)
    weight = dequantize_4bit(packed.weight.data, packed.weight.quant_state).float()
    row = torch.randn(300, 2048, device=device, dtype=torch.bfloat16, requires_grad=True)
    full = row.detach().float().requires_grad_()
    seed = torch.randn(300, 11008, device=device)
    worst = 0.0
    for ours, theirs in (
        (packed(row), full @ weight.T),
        (
            torch.autograd.grad((packed(row).float() * seed).sum(), row)[0],
            torch.autograd.grad(((full @ weight.T) * seed).sum(), full)[0],
        ),
    ):
        worst = max(worst, float((ours.float() - theirs).norm() / theirs.norm()))
    figure("a layer of 4 bits: worst relative error", worst, "")
    assert worst < 1e-2


def test_sleep_gives_memory_back_with_qwen3_5(run_ranks, family_model, gpu_config, figure):
    """A state beside the cache: it must not grow from cycle to cycle."""
    config = changed(gpu_config, model={"path": str(family_model("qwen3_5"))}, rollout={"sleep_level": 2})
    result = run_ranks("sleeping", config, timeout_s=LIMIT_S)[0]
    asleep, awake = result["asleep_gib"], result["awake_gib"]
    figure("GPU memory used, Qwen3.5 asleep after the last cycle", asleep[-1], "GiB")
    assert asleep[-1] < asleep[0] + 0.5 and awake[-1] < awake[0] + 0.5


def test_a_sleeping_engine_in_tensor_parallel(run_ranks, gpu_config, figure):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    config = changed(
        gpu_config, rollout={"tensor_parallel": 2, "sleep_level": 2}, placement={"workers_per_node": 2}
    )
    for rank, result in enumerate(run_ranks("sleeping", config, timeout_s=LIMIT_S)):
        asleep = result["asleep_gib"]
        figure(f"GPU memory used, tensor parallel 2, rank {rank} asleep", asleep[-1], "GiB")
        assert asleep[-1] < asleep[0] + 0.5, "NeMo-RL 2619 met a sleeping engine that grows"


def test_a_resume_goes_on(tmp_path, gpu_config, figure):
    """Two steps, then a third one in a process that reads the checkpoint of the second."""
    config = changed(gpu_config, run={"dir": str(tmp_path / "run"), "max_steps": 2})
    path = tmp_path / "run.yaml"
    path.write_text(c.dump(config))
    command = [sys.executable, "-m", "trainer.loops.grpo", "--config", str(path)]
    for steps in (2, 3):
        print(f"a run of {steps} steps", flush=True)
        subprocess.run([*command, "--set", f"run.max_steps={steps}"], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in Path(config.run.dir, "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "time/step_s" in line] == [1, 2, 3]
    figure("a step after a resume on cuda", lines[-1]["time/step_s"], "s")
