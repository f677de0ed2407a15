"""The GPUs of an AMD node as AMD SMI's Python library (`amdsmi`, in ROCm's images) shows them, in the form of
NVML's.

Calls and fields: AMD SMI Python API reference, ROCm 6 and 7 (*read*; no AMD GPU has run this).
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping
from typing import Any

from trainer.hardware.visible_gpus import visible_positions
from trainer.node.preflight.findings import Finding
from trainer.node.preflight.gpus import GpuReading, MeasuredGpu, judge_gpus

UNKNOWN = "N/A"
"""What the library answers where a GPU does not support a reading."""


def check_amd_gpus(rank: int, wanted: int) -> list[Finding]:
    """Findings of this node; none where there is no AMD driver, or no amdsmi to ask."""
    try:
        amdsmi = importlib.import_module("amdsmi")
    except (ImportError, OSError, KeyError):  # the last two: the package without the library that it loads
        return []
    try:
        return judge_gpus(read_amd_gpus(amdsmi), rank, wanted, 0, "")
    except amdsmi.AmdSmiException:
        return []


def read_amd_gpus(amdsmi: Any, env: Mapping[str, str] = os.environ) -> GpuReading:
    """Reads every visible GPU. amdsmi: the module. Raises its AmdSmiException if there is no driver."""
    amdsmi.amdsmi_init()
    try:
        handles = amdsmi.amdsmi_get_processor_handles()
        indices = visible_positions([_ids(amdsmi, handle) for handle in handles], env)
        gpus = tuple(_read_one(amdsmi, index, handles[index]) for index in indices)
        return GpuReading(driver="", cuda=0, gpus=gpus)
    finally:
        amdsmi.amdsmi_shut_down()


def _ids(amdsmi: Any, handle: Any) -> list[str]:
    """A GPU's name in ROCR_VISIBLE_DEVICES: GPU- and its serial number in hexadecimal digits."""
    with contextlib.suppress(amdsmi.AmdSmiException, KeyError):
        serial = str(amdsmi.amdsmi_get_gpu_asic_info(handle)["asic_serial"])
        return [f"GPU-{serial.lower().removeprefix('0x')}"]
    return []


def _read_one(amdsmi: Any, index: int, handle: Any) -> MeasuredGpu:
    def ask(function: str, *arguments: Any, otherwise: Any = None) -> Any:
        try:
            answer = getattr(amdsmi, function)(handle, *arguments)
        except amdsmi.AmdSmiException:
            return otherwise
        return otherwise if answer == UNKNOWN else answer

    def number(value: Any) -> int | None:
        return value if isinstance(value, int) else None

    def hottest(metric: str) -> int | None:
        kind = amdsmi.AmdSmiTemperatureType.HOTSPOT
        return number(ask("amdsmi_get_temp_metric", kind, getattr(amdsmi.AmdSmiTemperatureMetric, metric)))

    def pcie(part: str, name: str) -> int | None:
        return number((link.get(part) or {}).get(name))

    link = ask("amdsmi_get_pcie_info", otherwise={})
    pages = ask("amdsmi_get_gpu_bad_page_info", otherwise=[])
    states = [page["status"] for page in pages] if isinstance(pages, list) else []
    asic = ask("amdsmi_get_gpu_asic_info", otherwise={})
    listed = ask("amdsmi_get_gpu_process_list", otherwise=[])
    processes = tuple(entry["pid"] for entry in listed if isinstance(entry, dict) and entry.get("mem"))
    ecc = ask("amdsmi_get_gpu_total_ecc_count", otherwise={})
    return MeasuredGpu(
        index=index,
        name=str(asic.get("market_name") or "AMD GPU"),
        memory_bytes=ask("amdsmi_get_gpu_memory_total", amdsmi.AmdSmiMemoryType.VRAM, otherwise=0),
        uncorrected_ecc=number(ecc.get("uncorrectable_count")),
        remap_pending=amdsmi.AmdSmiMemoryPageStatus.PENDING in states,
        remap_failed=amdsmi.AmdSmiMemoryPageStatus.UNRESERVABLE in states,
        pcie_width=pcie("pcie_metric", "pcie_width"),
        pcie_width_max=pcie("pcie_static", "max_pcie_width"),
        temperature_c=hottest("CURRENT"),
        slowdown_c=hottest("CRITICAL"),
        processes=processes,
    )
