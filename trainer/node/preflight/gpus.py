"""The GPUs of this node as NVML reports them: read once, then checked by a pure function.

Field meanings and thresholds: NVIDIA's NVML API reference; Xid numbers: NVIDIA's "XID Errors" guide.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import runpy
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.hardware import driver as drivers
from trainer.hardware.visible_gpus import nvml_positions
from trainer.node.preflight import thresholds
from trainer.node.preflight.findings import Finding, Level, judged

SLOWDOWNS = {
    8: "hardware slowdown",
    32: "thermal slowdown",
    64: "hardware thermal slowdown",
    128: "power brake",
}
"""Bits of the clocks' event reasons that mean a fault; idle, power cap and application clocks do not."""
XIDS = {
    48: "double-bit ECC error",
    62: "internal controller halted",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fallen off the bus",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP timeout",
    120: "GSP error",
}
"""Xid errors of the hardware. 13, 31, 43 and 45 are left out: programs cause most of them."""


@dataclass(frozen=True, kw_only=True)
class MeasuredGpu:
    """One GPU. None where NVML does not support the reading."""

    index: int
    name: str
    memory_bytes: int
    uncorrected_ecc: int | None = None
    """Since the driver was loaded."""
    remap_pending: bool = False
    remap_failed: bool = False
    nvlinks: tuple[bool, ...] = ()
    """State of each link that the GPU has."""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation: int | None = None
    """The most that GPU and slot can do together; the current one falls when the GPU is idle."""
    slowdown: int = 0
    """Bits of the clocks' event reasons."""
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """Temperature at which it slows itself down."""
    processes: tuple[int, ...] = ()
    """Process ids that compute on it; numbers of the host, outside a container."""


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """NVML's readings of a node."""

    driver: str
    cuda: int
    """What the loaded libcuda runs, 1000 * major + 10 * minor; the kernel module's own may be older."""
    gpus: tuple[MeasuredGpu, ...]


def read_gpus(nvml: Any, env: Mapping[str, str] = os.environ) -> GpuReading:
    """Reads every visible GPU. nvml: the module pynvml. Raises its NVMLError if there is no driver."""
    nvml.nvmlInit()
    try:
        return GpuReading(
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            cuda=nvml.nvmlSystemGetCudaDriverVersion_v2(),
            gpus=tuple(_read_one(nvml, i) for i in nvml_positions(nvml, env)),
        )
    finally:
        nvml.nvmlShutdown()


def _read_one(nvml: Any, index: int) -> MeasuredGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: Callable[..., Any], *arguments: Any, otherwise: Any = None) -> Any:
        try:
            return function(handle, *arguments)
        except nvml.NVMLError:
            return otherwise

    _, _, pending, failed = ask(nvml.nvmlDeviceGetRemappedRows, otherwise=(0, 0, 0, 0))
    links = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = ask(nvml.nvmlDeviceGetNvLinkState, link)
        if state is None:
            break
        links.append(bool(state))
    return MeasuredGpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        uncorrected_ecc=ask(
            nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        remap_pending=bool(pending),
        remap_failed=bool(failed),
        nvlinks=tuple(links),
        pcie_width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth),
        pcie_width_max=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        pcie_generation=ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration),
        slowdown=ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, otherwise=0),
        temperature_c=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        slowdown_c=ask(nvml.nvmlDeviceGetTemperatureThreshold, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        processes=tuple(p.pid for p in ask(nvml.nvmlDeviceGetComputeRunningProcesses, otherwise=[])),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def kernel_log() -> str:
    """The kernel log since boot; "" where a container may not read it."""
    text = b""
    with contextlib.suppress(OSError):
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.suppress(OSError):
            while True:
                try:
                    text += os.read(descriptor, 8192)
                except BrokenPipeError:  # overwritten while it was read: skip to the next
                    continue
        os.close(descriptor)
    return text.decode(errors="replace")


def check_gpus(rank: int, wanted: int) -> list[Finding]:
    """Findings of this node; none without an NVIDIA driver (that is the count's finding, or amd.py's)."""
    import pynvml

    try:
        reading = read_gpus(pynvml)
    except pynvml.NVMLError as error:
        none = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        lost = f"the driver does not answer: {error}"
        return [] if getattr(error, "value", 0) in none else [judged("GPUs", (rank,), lost)]
    return judge_gpus(reading, rank, wanted, cuda_of_torch(), kernel_log())


def cuda_of_torch() -> int:
    """Major version of the CUDA that the installed torch was built for; 0 for a CPU build or without torch.

    Read from its file: importing torch takes seconds.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.origin:
        return 0
    version = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    return int((version["cuda"] or "0").partition(".")[0])


def judge_gpus(reading: GpuReading, rank: int, wanted: int, cuda: int, log: str) -> list[Finding]:
    """All findings on a node's GPUs. cuda: major version of the installed torch. log: the kernel's."""
    here = (rank,)
    used = reading.gpus[:wanted]
    findings = []
    if cuda:
        driver = f"driver {reading.driver}, CUDA {reading.cuda // 1000}"
        wrong = drivers.driver_problem(reading.cuda, cuda)
        findings.append(judged("driver", here, wrong, driver, f"CUDA {cuda}", "take another machine"))
    kinds = sorted({f"{gpu.name} of {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in used})
    names = ", ".join(kinds)
    mixed = f"its GPUs are not alike: {names}" if len(kinds) > 1 else ""
    findings.append(judged("GPU model", here, mixed, f"{len(used)} x {names}"))
    fastest = max((gpu.pcie_generation or 0 for gpu in used), default=0)
    linked = any(any(gpu.nvlinks) for gpu in reading.gpus)
    for gpu in used:
        for check, wrong, figure, level in _complaints(gpu, fastest, linked):
            text = f"GPU {gpu.index} {wrong}" if wrong else ""
            findings.append(judged(check, here, text, figure, level=level))
    xids = sorted(set(map(int, re.findall(r"NVRM: Xid \([^)]*\): (\d+)", log))) & XIDS.keys())
    logged = ", ".join(f"Xid {number} ({XIDS[number]})" for number in xids)
    text = f"the kernel log has {logged}" if xids else ""
    figure = "no Xid" if log else "the kernel log is not readable here"
    return [*findings, judged("kernel log", here, text, figure)]


def compare_gpus(findings: Iterable[Finding]) -> list[Finding]:
    """Findings on nodes whose GPUs or driver are not those of most nodes; in a tie, not those of the head."""
    out = []
    passed = [finding for finding in findings if finding.level == "pass"]
    rows: tuple[tuple[str, Level, str], ...] = (
        ("GPU model", "fail", "its GPUs are not the other nodes'"),
        ("driver", "warn", "its driver is not the other nodes'"),
    )
    for check, level, text in rows:
        figures = {finding.nodes[0]: finding.figure for finding in passed if finding.check == check}
        usual = statistics.mode(figures[rank] for rank in sorted(figures)) if figures else ""
        for rank, figure in figures.items():
            if figure != usual:
                out.append(judged(check, (rank,), f"{text}: {figure}, theirs {usual}", level=level))
    return out


def _nvlink(gpu: MeasuredGpu, linked: bool) -> tuple[str, str]:
    """(what is wrong or "", figure) of a GPU's NVLinks. linked: some GPU of the node has a link that is up.

    A card without a bridge, and one of a board whose fabric is off, answers "inactive" for every link that it
    could have (NVSentinel's pull request 1481; DCGM 49): that is a fault only where a neighbor's are up.
    """
    down = [str(i) for i, up in enumerate(gpu.nvlinks) if not up]
    if not down:
        return "", f"{len(gpu.nvlinks)} links"
    if len(down) == len(gpu.nvlinks) and not linked:
        return "", f"no bridge: none of {len(down)} links is up"
    return f"has NVLink {', '.join(down)} of {len(gpu.nvlinks)} down", ""


def _complaints(gpu: MeasuredGpu, fastest: int, linked: bool) -> list[tuple[str, str, str, Level]]:
    """(check, what is wrong or "", figure, level) of one GPU. fastest: PCIe generation of the node. linked:
    as for `_nvlink`."""
    ecc = f"has {gpu.uncorrected_ecc} uncorrectable memory errors" if gpu.uncorrected_ecc else ""
    rows = "has failed to remap a memory row" if gpu.remap_failed else ""
    pending = "" if rows or not gpu.remap_pending else "waits for a reset to remap a memory row"
    links, link_figure = _nvlink(gpu, linked)
    narrow = gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max
    pcie = f"is on PCIe x{gpu.pcie_width}, it can do x{gpu.pcie_width_max}" if narrow else ""
    if not pcie and (gpu.pcie_generation or fastest) < fastest:
        pcie = f"is on PCIe {gpu.pcie_generation}, others here on PCIe {fastest}"
    reasons = ", ".join(name for bit, name in SLOWDOWNS.items() if gpu.slowdown & bit)
    limit_c = (gpu.slowdown_c or 1000) - thresholds.GPU_TEMPERATURE_MARGIN_C
    hot = gpu.temperature_c is not None and gpu.temperature_c > limit_c
    heat = f"is at {gpu.temperature_c} C and slows down at {gpu.slowdown_c}" if hot else ""
    busy = f"is used by {len(gpu.processes)} other processes" if gpu.processes else ""
    return [
        ("ECC", ecc or rows, "no error", "fail"),
        ("row remapping", pending, "none pending", "warn"),
        ("NVLink", links, link_figure, "fail"),
        ("PCIe", pcie, f"x{gpu.pcie_width}, PCIe {gpu.pcie_generation}", "warn"),
        ("clocks", f"is slowed down: {reasons}" if reasons else "", "not slowed", "fail"),
        ("temperature", heat, "cool", "warn"),
        ("processes on the GPU", busy, "none", "warn"),
    ]
