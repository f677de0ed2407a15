"""Preflight names each fault that NVML reports, through pynvml and nvidia-smi as they are."""

from __future__ import annotations

import json

import pytest

from tests.nullgpu import null_device
from tests.nullgpu.null_device import PYTHON


def found(devices: int = 8, wanted: int = 8, **settings: object) -> dict:
    command = [PYTHON, "-m", "tests.nullgpu.scripts.preflight", str(wanted)]
    return json.loads(null_device.run(command, devices=devices, settings=settings).stdout)


def bad(said: dict) -> dict[str, tuple[str, str]]:
    """Check -> (level, figure) of what is not well."""
    return {f["check"]: (f["level"], f["figure"]) for f in said["findings"] if f["level"] != "pass"}


def test_a_healthy_node_passes():
    said = found()
    assert bad(said) == {}
    assert said["visible"] == 8
    assert {f["check"] for f in said["findings"]} >= {"driver", "GPU model", "ECC", "NVLink", "clocks"}


FAULTS = {
    "ecc@3=2": ("ECC", "fail", "GPU 3 has 2 uncorrectable memory errors"),
    "remap-failed@2": ("ECC", "fail", "GPU 2 has failed to remap a memory row"),
    "remap-pending@2": ("row remapping", "warn", "GPU 2 waits for a reset to remap a memory row"),
    "link@1=17": ("NVLink", "fail", "GPU 1 has NVLink 17 of 18 down"),
    "pcie@4=8": ("PCIe", "warn", "GPU 4 is on PCIe x8, it can do x16"),
    "slow@0=64": ("clocks", "fail", "GPU 0 is slowed down: hardware thermal slowdown"),
    "slow@0=136": ("clocks", "fail", "GPU 0 is slowed down: hardware slowdown, power brake"),
    "hot@5=95": ("temperature", "warn", "GPU 5 is at 95 C and slows down at 97"),
    "busy@0=4242": ("processes on the GPU", "warn", "GPU 0 is used by 1 other processes"),
    "model@2": ("GPU model", "fail", "its GPUs are not alike"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault):
    check, level, figure = FAULTS[fault]
    wrong = bad(found(FAULTS=fault))
    assert list(wrong) == [check]
    assert wrong[check][0] == level
    assert wrong[check][1].startswith(figure)


def test_fewer_gpus_are_counted():
    assert found(devices=7)["visible"] == 7


def test_an_old_driver_is_named():
    said = bad(found(DRIVER="570.86.15", CUDA=12080))["driver"][1]
    assert said.startswith("the loaded driver library runs CUDA 12.8, and CUDA 13 needs driver 580.65")
