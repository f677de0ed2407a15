"""The one table of GPUs, for plan, targets and utilization. Figures are the makers' data sheets, dense
bf16."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from trainer.system.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    driver: str
    """Regular expression for what the driver calls it, between word boundaries."""
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
    "L4": Gpu(
        driver=r"L4", memory_gib=22.0, bf16_tflops=121, hbm_gb_per_s=300, nvlink_gb_per_s=25, pcie_gb_per_s=25
    ),
    "L40S": Gpu(
        driver=r"L40S",
        memory_gib=44.4,
        bf16_tflops=362,
        hbm_gb_per_s=864,
        nvlink_gb_per_s=25,
        pcie_gb_per_s=25,
    ),
    "A100": Gpu(
        driver=r"A[18]00",
        memory_gib=39.4,
        bf16_tflops=312,
        hbm_gb_per_s=1555,
        nvlink_gb_per_s=300,
        pcie_gb_per_s=25,
    ),
    "A100-80GB": Gpu(
        driver=r"A[18]00",
        memory_gib=79.2,
        bf16_tflops=312,
        hbm_gb_per_s=2039,
        nvlink_gb_per_s=300,
        pcie_gb_per_s=25,
    ),
    "H100": Gpu(
        driver=r"H[18]00",
        memory_gib=79.2,
        bf16_tflops=989,
        hbm_gb_per_s=3350,
        nvlink_gb_per_s=450,
        pcie_gb_per_s=50,
    ),
    "H200": Gpu(
        driver=r"G?H200",
        memory_gib=139.8,
        bf16_tflops=989,
        hbm_gb_per_s=4800,
        nvlink_gb_per_s=450,
        pcie_gb_per_s=50,
    ),
    "B200": Gpu(
        driver=r"B[23]00",
        memory_gib=178.4,
        bf16_tflops=2250,
        hbm_gb_per_s=8000,
        nvlink_gb_per_s=900,
        pcie_gb_per_s=50,
    ),
    "MI300X": Gpu(
        driver=r"MI3(00|25)X",
        memory_gib=191.0,
        bf16_tflops=1307,
        hbm_gb_per_s=5300,
        nvlink_gb_per_s=448,
        pcie_gb_per_s=50,
    ),
}

BATCH_INVARIANT = ("H100", "H200", "B200")
"""GPUs on which vLLM's batch-invariant mode leaves torch's own products in place. On older ones it puts
kernels without gradients under every product of the process, the policy's too
(vllm/model_executor/determinism)."""

OTHERS = {
    r"GB[23]00": 2500,
    r"H200\b.*NVL": 835,
    r"H100\b.*NVL": 835,
    r"H100\b.*PCIe": 756,
    r"H20": 148,
    r"A40": 149.7,
    r"A30": 165,
    r"A10G": 70,
    r"A10": 125,
    r"RTX A6000": 154.8,
    r"L40": 181,
    r"RTX 4090": 165.2,
    r"MI250X?": 191.5,
}
"""Driver name -> dense bf16 TFLOP/s of GPUs and variants that no target offers by name. Figures with sparsity
are halved. MI250 counts as its two dies, which ROCm shows as devices."""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU by its driver's name, FLOP/s; None for an unknown one, a MIG slice, or a
    CPU."""
    if re.search(r"\bMIG\b", device_name):
        return None
    names = OTHERS | {gpu.driver: gpu.bf16_tflops for gpu in GPUS.values()}
    return next((1e12 * peak for name, peak in names.items() if re.search(rf"\b{name}\b", device_name)), None)


def gpu_named(name: str) -> Gpu:
    """The GPU of that name. Raises ConfigError naming the nearest one."""
    if name.upper() in ("GH200", "GB200", "GB300"):
        raise ConfigError(
            f"{name} has an ARM processor, for which no environment is locked: take H200 or B200"
        )
    if name not in GPUS:
        near = difflib.get_close_matches(name.upper(), GPUS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(GPUS)}"
        raise ConfigError(f"unknown GPU {name}: {hint}")
    return GPUS[name]
