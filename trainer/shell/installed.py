"""Whether an environment is whole and can be imported; setup.sh asks at its end.

`.venvs/NAME/bin/python trainer/shell/installed.py files` prints the packages of which a file is missing, one
a line: where two packages owned a file, removing or upgrading one of them took it from the other. `… imports`
imports what a GPU's run imports and names on stderr what fails; exit code 1. It needs no GPU: the modules of
NEEDS_DRIVER are left out, by name, where there is no driver. Standard library only, run as a file.
"""

from __future__ import annotations

import csv
import ctypes
import importlib
import logging
import os
import sys
import sysconfig
import time
import traceback
import warnings
from pathlib import Path

NAMES = """
torch torchvision triton transformers accelerate peft bitsandbytes deepspeed ray fla.ops.gated_delta_rule
cuda.bindings.runtime flashinfer cutlass
vllm vllm.compilation.passes.pass_manager vllm.distributed.device_communicators.cuda_communicator
vllm.v1.worker.gpu.model_runner vllm.v1.worker.gpu.sample.sampler vllm.v1.worker.gpu_worker
PIL huggingface_hub isal.igzip_threaded mpmath msgspec numpy obstore psutil pyarrow.parquet pynvml rich
safetensors tensorboard wandb yaml
"""
MODULES = tuple(NAMES.split())
"""What the processes of a run on GPUs import; tests/test_installed.py holds it against the trainer's code.
vLLM takes those of the second line if they can be imported, and guards that by ImportError alone."""
DRIVERS = """
vllm._C_stable_libtorch vllm._moe_C_stable_libtorch vllm.cumem_allocator vllm.platforms.cuda
vllm.vllm_flash_attn._vllm_fa2_C vllm.vllm_flash_attn._vllm_fa3_C
"""
NEEDS_DRIVER = tuple(DRIVERS.split())
"""Libraries of vLLM that link to the driver's: none of them can be loaded without one."""


def incomplete_packages(site_packages: Path) -> list[str]:
    """Names of the packages of which a file is missing. Some wheels' RECORDs have wrong sizes."""
    names = set()
    for record in site_packages.glob("*.dist-info/RECORD"):
        with record.open(newline="") as lines:
            for path, hashed, *_ in csv.reader(lines):
                if hashed and not path.endswith(".pyc") and not os.path.exists(site_packages / path):
                    names.add(record.parent.name.split("-")[0])
    return sorted(names)


def has_driver() -> bool:
    """Whether CUDA's driver library can be loaded here."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def import_failures(modules: tuple[str, ...]) -> list[str]:
    """The modules that cannot be imported, each with its error and where that was raised."""
    failed = []
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # an AttributeError as well as an ImportError
            place = traceback.extract_tb(error.__traceback__)[-1]
            failed.append(f"{module}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})")
    return failed


def main(command: str) -> int:
    """Prints what was found; 1 if an import fails."""
    if command == "files":
        for name in incomplete_packages(Path(sysconfig.get_path("purelib"))):
            print(name)
        return 0

    started = time.monotonic()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    driver = has_driver()
    failed = import_failures(MODULES + NEEDS_DRIVER if driver else MODULES)
    for line in failed:
        print(f"error: this environment cannot import {line}", file=sys.stderr)
    if failed:
        return 1
    print(f"imported what a run imports in {time.monotonic() - started:.0f} s")
    if not driver:
        print(f"there is no GPU driver here, so these were not looked at: {', '.join(NEEDS_DRIVER)}")
    return 0


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file has modules of its own
    sys.exit(main(sys.argv[1]))
