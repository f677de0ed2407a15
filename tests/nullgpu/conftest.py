"""Tests on the device that is not there: `pytest -m nullgpu`. They need the GPU environment (`bash
trainer/setup.sh gpu`), gcc, and no GPU; they are in no other selection."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nullgpu import build


def pytest_collection_modifyitems(items):
    there = (build.SITE / "nvidia/cu13/include/cuda.h").exists()
    for item in items:
        if Path(item.fspath).parent != Path(__file__).parent:
            continue
        item.add_marker(pytest.mark.nullgpu)
        if not there:
            item.add_marker(pytest.mark.skip(reason="no GPU environment: bash trainer/setup.sh gpu"))
