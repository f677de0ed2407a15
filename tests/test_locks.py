"""The locks install environments in which each file has one owner, and what must agree about CUDA agrees."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from requirements import owners
from tests.conftest import ROOT

LOCKS = ROOT / "requirements"
TOOLKIT = (
    "nvidia-cuda-nvcc",
    "nvidia-cuda-crt",
    "nvidia-cuda-cccl",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-cupti",
    "nvidia-nvtx",
    "cuda-toolkit",
)
"""Packages of CUDA's toolkit that are numbered as it is: cccl stops a compiler of another number."""

AS_LOCKED_BEFORE = """
cuda-bindings==13.5.0 \\
cuda-core==1.2.2 \\
cuda-python==12.6.2.post1 \\
nvidia-cuda-nvcc==13.5.20 \\
nvidia-cuda-runtime==13.0.96 \\
nvidia-nccl-cu12==2.27.5 \\
nvidia-nccl-cu13==2.29.7 \\
"""
"""Lines of a lock that resolved and whose environment could not import vLLM's sampler."""


def disagreements(lock: str) -> list[str]:
    """Pins of a lock's text that do not fit the CUDA that its torch is built for."""
    pins = owners.pins(lock)
    runtime = pins["nvidia-cuda-runtime"]
    toolkit, major = runtime.rsplit(".", 1)[0], runtime.split(".")[0]
    wrong = []
    for name in TOOLKIT:
        if name in pins and not pins[name].startswith(toolkit + "."):
            wrong.append(f"{name}=={pins[name]}")

    bindings = pins.get("cuda-bindings", "")
    if bindings.split(".")[0] != major or pins.get("cuda-python", bindings) != bindings:
        wrong.append(f"cuda-python=={pins.get('cuda-python')} beside cuda-bindings=={bindings}")

    # Packages of two majors own the same libraries; those of cutlass-dsl keep theirs apart.
    for name, version in pins.items():
        found = re.fullmatch(r"nvidia-(?!cutlass).*-cu(\d+)", name)
        if found and found.group(1) != major:
            wrong.append(f"{name}=={version}")
    return wrong


@pytest.mark.parametrize("name", owners.LOCKS)
def test_no_file_of_a_lock_has_two_owners(name):
    digest = json.loads(owners.DIGEST.read_text())[name]
    assert digest["pins"] == owners.key((LOCKS / f"{name}.txt").read_text()), "python requirements/owners.py"
    assert digest["files"] > 1000
    assert set(digest["shared"]) <= set(owners.BENIGN)


def test_every_lock_is_looked_at():
    not_locks = {"overrides.txt"}
    assert {f"{name}.txt" for name in owners.LOCKS} == {p.name for p in LOCKS.glob("*.txt")} - not_locks


@pytest.mark.parametrize("name", owners.LOCKS)
def test_the_installed_wheels_say_the_same(name):
    environment = ROOT / ".venvs" / name
    if not (environment / "bin/python").exists():
        pytest.skip(f"environment {name} is not here")
    found = owners.records(owners.site_packages(environment))
    packages = dict(package.split("==") for by in found.values() for package in by)
    if packages != owners.pins((LOCKS / f"{name}.txt").read_text()):
        pytest.skip(f"environment {name} is of another lock")
    digest = json.loads(owners.DIGEST.read_text())[name]
    assert digest["files"] == len(found)
    assert digest["shared"] == owners.shared(found)


def wheel(folder: Path, package: str, **files: str) -> None:
    """The RECORD that an installed wheel leaves; files: contents' hash by name."""
    record = folder / f"{package}.dist-info" / "RECORD"
    record.parent.mkdir()
    lines = [f'"cuda/{name}.so",sha256={hashed},9' for name, hashed in files.items()]
    record.write_text("\n".join([*lines, f"{package}.dist-info/RECORD,,"]) + "\n")


def test_two_owners_of_a_file_are_found_by_their_records(tmp_path):
    wheel(tmp_path, "cuda_python-12.6.2.post1", driver="a", nvrtc="b", same="c")
    wheel(tmp_path, "cuda_bindings-13.5.0", driver="A", nvrtc="B", same="c")
    both = ["cuda-bindings==13.5.0", "cuda-python==12.6.2.post1"]
    assert owners.shared(owners.records(tmp_path)) == {"cuda/driver.so": both, "cuda/nvrtc.so": both}


def test_a_lock_agrees_about_cuda():
    assert disagreements((LOCKS / "gpu.txt").read_text()) == []
    assert disagreements(AS_LOCKED_BEFORE) == [
        "nvidia-cuda-nvcc==13.5.20",
        "cuda-python==12.6.2.post1 beside cuda-bindings==13.5.0",
        "nvidia-nccl-cu12==2.27.5",
    ]
