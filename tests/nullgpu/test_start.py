"""What must work before a GPU run can begin."""

from __future__ import annotations

import json

from tests.nullgpu import null_device
from tests.nullgpu.null_device import PYTHON


def test_every_module_of_a_gpu_run_imports():
    """vLLM takes a failure of FlashInfer or cutlass for its absence, so both are imported by themselves."""
    said = json.loads(
        null_device.run([PYTHON, "-m", "tests.nullgpu.scripts.imports"]).stdout.splitlines()[-1]
    )
    assert said["wrong"] == {}
    assert said["imported"] > 150


def test_the_driver_of_a_bare_card_is_named():
    """The first call of tests/gpu/README.md."""
    command = [PYTHON, "trainer/hardware/driver.py"]
    assert "runs CUDA 13" in null_device.run(command).stdout
    old = null_device.run(command, settings={"CUDA": 12080}, check=False)
    assert old.returncode == 36 and "runs CUDA 12.8" in old.stderr


def test_ray_finds_the_cards():
    code = (
        "from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager as found;"
        "print(found.get_current_node_num_accelerators(), found.get_current_node_accelerator_type())"
    )
    done = null_device.run([PYTHON, "-c", code], devices=8, card="A100")
    assert done.stdout.split() == ["8", "A100"]


def test_the_checks_of_a_card_are_collected_for_it():
    command = [PYTHON, "-m", "pytest", "tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    said = null_device.run(command, devices=2).stdout
    assert "tests/gpu/test_gpu.py: " in said and "tests/gpu/test_gpu_plan.py: " in said
    assert "error" not in said


def test_forward_compatibility_libraries_and_the_kernel_module_differ():
    """libcuda of CUDA 13 beside a kernel module of 12.8. NVML's CUDA version is libcuda's."""
    code = (
        "import ctypes, pynvml; pynvml.nvmlInit(); version = ctypes.c_int();"
        "ctypes.CDLL('libcuda.so.1').cuDriverGetVersion(ctypes.byref(version));"
        "print(version.value, pynvml.nvmlSystemGetCudaDriverVersion_v2());"
        "print(pynvml.nvmlSystemGetDriverVersion())"
    )
    settings = {"DRIVER": "570.86.15", "CUDA": 13000}
    done = null_device.run([PYTHON, "-c", code], settings=settings)
    assert done.stdout.split() == ["13000", "13000", "570.86.15"]
