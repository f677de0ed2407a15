"""Tests on the device that is not there: `pytest -m nullgpu`. They need the GPU environment (`bash
trainer/shell/setup.sh gpu`), gcc, and no GPU; they are in no other selection. With SPOTRL_RECORD=1 each
result goes into benchmarks/nullgpu.json, from which docs/planned.md says what was executed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.nullgpu import build

HERE = Path(__file__).parent
RESULTS = build.ROOT / "benchmarks/nullgpu.json"


def pytest_collection_modifyitems(items):
    there = (build.SITE / "nvidia/cu13/include/cuda.h").exists()
    for item in items:
        if Path(item.fspath).parent != HERE:
            continue
        item.add_marker(pytest.mark.nullgpu)
        if not there:
            item.add_marker(pytest.mark.skip(reason="no GPU environment: bash trainer/shell/setup.sh gpu"))


def pytest_runtest_logreport(report):
    ended = report.when == "call" or report.failed
    if not ended or report.skipped or os.environ.get("SPOTRL_RECORD") != "1":
        return
    if not report.nodeid.startswith("tests/nullgpu/"):
        return
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"tests": {}}
    name = report.nodeid.removeprefix("tests/nullgpu/")
    known["tests"][name] = {"passed": report.passed, "seconds": round(report.duration, 1)}
    known["tests"][name] |= dict(report.user_properties)
    known["tests"] = dict(sorted(known["tests"].items()))
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
