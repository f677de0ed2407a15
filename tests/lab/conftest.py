"""Where LAB_FIGURES names a file, every lab that passes writes its duration and its figures there, as
seconds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.machine import processor


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


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """How long each lab took, its cluster included."""
    if report.when == "call" and report.passed and "tests/lab/" in report.nodeid:
        note("took_s", report.nodeid.partition("tests/lab/")[2], report.duration)
