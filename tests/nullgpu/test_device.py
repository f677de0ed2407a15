"""The device itself: what PyTorch and NCCL find on it."""

from __future__ import annotations

import json

import pytest

from tests.nullgpu import counts, null_device
from tests.nullgpu.null_device import PYTHON


@pytest.mark.parametrize("segments", ["", "expandable_segments:True"])
def test_torch_finds_a_card_whose_memory_and_waits_are_counted(tmp_path, monkeypatch, segments):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", segments)
    settings = {"CALLERS": 1}
    command = [PYTHON, "-m", "tests.nullgpu.scripts.torch_basics"]
    done = null_device.run(command, devices=8, record=tmp_path, settings=settings)
    said = json.loads(done.stdout)
    assert said["devices"] == 8
    assert said["name"] == "NVIDIA H100 80GB HBM3"
    assert said["capability"] == [9, 0]
    assert said["gradient"] == [64, 64]
    assert said["copied"]
    assert said["launches"] > 4
    assert said["waits"] == 0
    assert 0.98 < said["gib"] < 1.1  # an expandable segment has room of earlier tensors
    assert said["too much"].startswith("OutOfMemoryError")
    assert "not permitted when stream is capturing" in said["wait in a graph"]
    (recorded,) = counts.read(tmp_path)
    assert recorded.total("wait", "wait") == 1
    (where,) = [frames for phase, _, frames in recorded.callers if phase == "wait"]
    assert "torch_basics.py" in where and where.split(" < ")[0].endswith("main")


def test_ranks_exchange_real_data(tmp_path, free_port):
    command = [PYTHON, "-m", "tests.nullgpu.scripts.two_ranks", str(free_port), "equal"]
    null_device.run(command, devices=2, record=tmp_path)
    ranks = [one for one in counts.read(tmp_path) if one.collectives]
    assert len(ranks) == 2
    assert counts.differences(ranks) == []
    operations = {call.operation for one in ranks for calls in one.collectives.values() for call in calls}
    assert operations == {"all-reduce", "all-gather", "reduce-scatter", "broadcast"}


def test_a_hang_of_unequal_ranks_is_named(tmp_path, free_port):
    command = [PYTHON, "-m", "tests.nullgpu.scripts.two_ranks", str(free_port), "unequal"]
    done = null_device.run(command, devices=2, record=tmp_path, check=False)
    assert done.returncode
    assert "all-reduce of 10 elements of type 7 here, on rank 1 it is all-reduce of 11" in done.stderr
    (difference,) = counts.differences(counts.read(tmp_path))
    assert "on rank 0" in difference and "elements=11" in difference


@pytest.mark.parametrize("card, capability", [("A100", [8, 0]), ("B200", [10, 0])])
def test_cards_differ(card, capability):
    code = "import torch; p = torch.cuda.get_device_properties(0); print([p.major, p.minor])"
    done = null_device.run([PYTHON, "-c", code], card=card)
    assert json.loads(done.stdout) == capability
