"""The kernel of gated delta-net layers: its source, run by Triton's interpreter, is PyTorch's recurrence over
packed rows and through a whole model; and a run refuses one that is missing or wrong."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys

import pytest
import torch

from examples import packages
from tests.conftest import ROOT
from tests.learning.test_delta import with_boundaries
from trainer.config import ConfigError
from trainer.config.budget import CHUNK
from trainer.learning import gated_delta_kernel

HEADS, WIDTH = 2, 32


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A folder with the package that the lock for GPUs pins. Where it could be imported, transformers would
    take its kernels on a CPU too, so no environment for CPUs has it."""
    entries = re.split(r"(?m)^(?=\S)", (ROOT / "requirements/gpu.txt").read_text())
    pinned = [entry for entry in entries if entry.startswith("fla-core==")]
    requirements = tmp_path_factory.mktemp("requirements") / "kernels.txt"
    requirements.write_text("".join(pinned))
    folder = tmp_path_factory.mktemp("kernels")
    packages.install_requirements(requirements, folder, "flash-linear-attention's kernels")
    return folder


def interpreted(kernels, *arguments) -> dict:
    """What `tests.learning.rank_scripts.interpreted_kernel` finds."""
    out, *_ = arguments
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{kernels}"}
    command = [sys.executable, "-m", "tests.learning.rank_scripts.interpreted_kernel", *map(str, arguments)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    print(found)
    return found


@pytest.mark.slow
@pytest.mark.long
def test_a_models_gradients_by_the_kernel_in_tritons_interpreter(kernels, family_model, tmp_path):
    found = interpreted(kernels, tmp_path / "found.json", family_model("qwen3_5"))
    assert found["model"] < 1e-5


@pytest.mark.slow
@pytest.mark.long
def test_the_kernel_in_tritons_interpreter(kernels, tmp_path):
    found = interpreted(kernels, tmp_path / "found.json")
    assert found["row"] < 3e-6
    assert max(found["sound"].values()) < 3e-6
    wrong = gated_delta_kernel.first_excess(found["miscompiled"])
    assert wrong == "the gradient of keys wrongly (off by 0.5 of it)"

    # The plan counts what PyTorch's recurrence keeps, which is more.
    kept, peak = found["kept"]
    counted = 4 * HEADS * (11 * WIDTH + 3 * WIDTH + 5 * CHUNK + WIDTH * WIDTH // CHUNK)
    gradients = 4 * HEADS * (5 * WIDTH + 2 * WIDTH + CHUNK)
    assert kept < found["tokens"] * counted / 4 and peak < found["tokens"] * (counted + gradients) / 3


def test_a_missing_kernel_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    with pytest.raises(
        ConfigError, match="requirements/gpu.txt pins as fla-core, or set model.recurrence=torch"
    ):
        gated_delta_kernel.load_kernel()


class Layer(torch.nn.Module):
    """What is asked of a gated delta-net layer."""

    A_log = 0.0
    num_v_heads = HEADS
    head_k_dim = WIDTH
    head_v_dim = WIDTH


def test_a_kernel_that_does_not_run_here_is_named(monkeypatch):
    """The package itself raises on a GPU for which its Triton is too old."""

    def raises(error):
        def kernel(*rows, **options):
            raise error

        monkeypatch.setattr(gated_delta_kernel, "load_kernel", lambda: kernel)
        return gated_delta_kernel.checked_kernel(
            torch.nn.Sequential(Layer()), torch.device("cpu"), torch.bfloat16
        )

    with pytest.raises(
        ConfigError, match=r"does not run \(RuntimeError: Triton is old\).*set model.recurrence=torch"
    ):
        raises(RuntimeError("Triton is old"))
    with pytest.raises(torch.OutOfMemoryError):  # no word on the configuration: a restart may have the memory
        raises(torch.OutOfMemoryError("full"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_run_compares_in_its_own_type_and_at_the_length_of_its_rows(monkeypatch, dtype):
    seen = []

    def kernel(query, *rows, **options):
        seen.append((query.dtype, query.shape[1]))
        raise RuntimeError("seen")

    monkeypatch.setattr(gated_delta_kernel, "load_kernel", lambda: kernel)
    with pytest.raises(ConfigError, match="seen"):
        gated_delta_kernel.checked_kernel(torch.nn.Sequential(Layer()), torch.device("cpu"), dtype)
    [(used, tokens)] = seen
    assert used == dtype and tokens > 4000


def test_the_kernel_that_was_compared_is_named(monkeypatch, capsys):
    """flash-linear-attention chooses by what it finds on the machine, and says so at most in its log."""

    def kernel(*rows, **options):
        logging.getLogger("fla.backends").info("[FLA Backend] common.chunk_bwd_dqkwg -> tilelang")
        return with_boundaries(*rows, **options)

    monkeypatch.setattr(gated_delta_kernel, "load_kernel", lambda: kernel)
    monkeypatch.setattr(gated_delta_kernel, "ON_A_GPU", gated_delta_kernel.LENGTHS)
    model = torch.nn.Sequential(Layer())
    assert gated_delta_kernel.checked_kernel(model, torch.device("cpu"), torch.bfloat16) is kernel
    assert "by Triton, common.chunk_bwd_dqkwg -> tilelang" in capsys.readouterr().out


def test_a_kernel_is_compared_at_its_output_and_each_gradient():
    def compared(kernel):
        off = gated_delta_kernel.kernel_differences(kernel, HEADS, WIDTH, WIDTH, torch.device("cpu"))
        return gated_delta_kernel.first_excess(off)

    def not_a_number(*rows, **options):
        return with_boundaries(*rows, **options)[0] * float("nan"), None

    def without_decays(*rows, g, **options):
        return with_boundaries(*rows, g=g.detach() + 0.0 * g, **options)

    assert compared(with_boundaries) == ""
    assert compared(not_a_number) == "the output wrongly (off by nan of it)"
    assert compared(without_decays) == "the gradient of decays wrongly (off by 1 of it)"
