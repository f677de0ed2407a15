"""GPUs as the plan and the targets know them. Figures are the makers' datasheets, dense bf16."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    memory_gib: float
    """Memory that a process can allocate, GiB (what the driver reports, less its own reserve)."""
    bf16_tflops: float
    """Peak dense bf16, TFLOP/s."""
    hbm_gb_per_s: float
    """Memory bandwidth, GB/s."""
    nvlink_gb_per_s: float
    """To the other GPUs of the node, GB/s per direction."""
    pcie_gb_per_s: float
    """To host memory, GB/s, as commonly reached."""


GPUS = {
    "L4": Gpu(memory_gib=22.0, bf16_tflops=121, hbm_gb_per_s=300, nvlink_gb_per_s=25, pcie_gb_per_s=25),
    "L40S": Gpu(memory_gib=44.4, bf16_tflops=362, hbm_gb_per_s=864, nvlink_gb_per_s=25, pcie_gb_per_s=25),
    "A100": Gpu(memory_gib=39.4, bf16_tflops=312, hbm_gb_per_s=1555, nvlink_gb_per_s=300, pcie_gb_per_s=25),
    "A100-80GB": Gpu(memory_gib=79.2, bf16_tflops=312, hbm_gb_per_s=2039, nvlink_gb_per_s=300, pcie_gb_per_s=25),
    "H100": Gpu(memory_gib=79.2, bf16_tflops=989, hbm_gb_per_s=3350, nvlink_gb_per_s=450, pcie_gb_per_s=50),
    "H200": Gpu(memory_gib=139.8, bf16_tflops=989, hbm_gb_per_s=4800, nvlink_gb_per_s=450, pcie_gb_per_s=50),
    "B200": Gpu(memory_gib=178.4, bf16_tflops=2250, hbm_gb_per_s=8000, nvlink_gb_per_s=900, pcie_gb_per_s=50),
    "MI300X": Gpu(memory_gib=191.0, bf16_tflops=1307, hbm_gb_per_s=5300, nvlink_gb_per_s=448, pcie_gb_per_s=50),
}


def gpu_named(name: str) -> Gpu:
    """The GPU of that name. Raises ConfigError naming the nearest one."""
    if name not in GPUS:
        near = difflib.get_close_matches(name.upper(), GPUS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(GPUS)}"
        raise ConfigError(f"unknown GPU {name}: {hint}")
    return GPUS[name]
