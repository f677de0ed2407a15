"""Where LAB_FIGURES names a file, every lab that passes writes its duration and its figures there, as
seconds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import runpod_lab

from benchmarks.machine import processor
from recipes.presets import resolve


def note(section: str, name: str, seconds: float) -> None:
    """One figure into the file, beside those of other runs."""
    if not (path := os.environ.get("LAB_FIGURES")):
        return
    figures = json.loads(Path(path).read_text()) if Path(path).exists() else {}
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    figures |= {"machine": f"{os.cpu_count()} cores, {processor()}", "revision": revision}
    figures.setdefault(section, {})[name] = round(seconds, 1)
    Path(path).write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


@pytest.fixture
def figure():
    """figure(name, seconds): something that a lab has measured."""
    return lambda name, seconds: note("measured_s", name, seconds)


@pytest.fixture(scope="module")
def desk(tmp_path_factory, tiny_model, mixed_dataset):
    """SkyPilot's API server, the stand-in and the store; the data is in the bucket, the model in the
    image."""
    with runpod_lab.Desk(tmp_path_factory.mktemp("runpod")) as made:
        data, model = (step.creates.split("/")[1] for step in resolve("demo", []).steps)
        shutil.copytree(mixed_dataset, made.buckets / "bucket/runs/data" / data)
        shutil.copytree(tiny_model, made.image / "workspace/models" / model)
        yield made


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """How long each lab took, its cluster included."""
    if report.when == "call" and report.passed and "tests/lab/" in report.nodeid:
        note("took_s", report.nodeid.partition("tests/lab/")[2], report.duration)
