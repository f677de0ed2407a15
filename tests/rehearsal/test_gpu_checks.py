"""The GPU checks run on a CPU as far as they can: the first hour on a card is for what only a card can
show."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.learning.one_rank import held_bytes

CASES = (
    "test_gpu.py::test_packed_gradients_in_bf16[True]",
    "test_gpu.py::test_parity_in_bf16[False]",
    "test_gpu_plan.py::test_rates_of_three_billion_parameters",
)


def rehearse(tmp_path, *options: str) -> dict:
    """Runs checks in a process of their own; returns their figures by name."""
    out = tmp_path / "gpu.json"
    env = os.environ | {"SPOTRL_REHEARSE_GPU": "1", "SPOTRL_GPU_JSON": str(out)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(out.read_text())["figures"]


@pytest.mark.long
def test_the_checks_are_collected_without_vllm():
    """A card that is lent bare has PyTorch; what needs no engine runs there."""
    collect = "import sys, pytest; sys.modules['vllm'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    command = [sys.executable, "-c", collect, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


class Fake(torch.Tensor):
    """A tensor without a storage of its own."""

    @classmethod
    def __torch_dispatch__(cls, *_):
        raise NotImplementedError


def test_tensors_that_torch_compile_leaves_hold_nothing():
    left = torch.Tensor._make_wrapper_subclass(Fake, (1 << 30,))
    with pytest.raises(RuntimeError):
        left.untyped_storage().data_ptr()
    before = held_bytes()
    real = torch.empty(1 << 20)
    assert held_bytes() - before == real.nbytes and left.numel() == 1 << 30


@pytest.mark.long
def test_the_first_checks_run(tmp_path):
    figures = rehearse(tmp_path, *(f"tests/gpu/{case}" for case in CASES))
    assert figures["packed gradients in bf16, recomputed True: relative error over all"]["value"] < 3e-2
    assert figures["parity, bf16, CUDA graphs: mean |log-prob difference|"]["value"] < 5e-2
    assert figures["3B shape: ours against bare vLLM (aim 0.97)"]["value"] > 0


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_all_that_can_run(tmp_path):
    figures = rehearse(tmp_path, "tests/gpu")
    assert "parity, Qwen3-VL, CUDA graphs: mean |log-prob difference|" in figures
    assert "3B shape: host memory at most, a save after every step" in figures
