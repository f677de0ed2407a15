"""The one table of GPUs, for plan, targets and utilization. Figures are the makers' data sheets, dense
bf16."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from trainer.system.errors import ConfigError


@dataclass(frozen=True)
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
    # what the driver calls it, GiB, TFLOP/s, and GB/s of its memory, of NVLink or the bus, and to the host
    "L4":        Gpu(r"L4",          22.0,  121,  300,  25, 25),
    "L40S":      Gpu(r"L40S",        44.4,  362,  864,  25, 25),
    "A100":      Gpu(r"A[18]00",     39.4,  312, 1555, 300, 25),
    "A100-80GB": Gpu(r"A[18]00",     79.2,  312, 2039, 300, 25),
    "H100":      Gpu(r"H[18]00",     79.2,  989, 3350, 450, 50),
    "H200":      Gpu(r"G?H200",     139.8,  989, 4800, 450, 50),
    "B200":      Gpu(r"B[23]00",    178.4, 2250, 8000, 900, 50),
    "MI300X":    Gpu(r"MI3(00|25)X", 191.0, 1307, 5300, 448, 50),
}  # fmt: skip

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
