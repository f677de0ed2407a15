"""Samples a node for its launcher: GPUs, network, disk, memory, and which rank keeps others waiting."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from trainer.config.run_folder import NODES, newest_lines
from trainer.hardware.visible_gpus import nvml_positions
from trainer.observe import beacon
from trainer.observe.history import SLOWED, column
from trainer.system import server_waits

EVERY_S = 10.0
STRAGGLES = 0.3
"""A rank straggles if the share of time that it waits in collectives is this much below the others'
median."""
WINDOW_S = 30.0
"""Shortest time for which ranks are compared."""
RAYS_OWN = ("ray::Dash", "ray::Runtime", "ray::IDLE")
"""Starts of names of Ray's processes that are no actors. The kernel keeps 15 characters."""


class NodeStats:
    """What the machines did in a step, for its metrics: all nodes where their launchers sample them, else
    this one."""

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        self._since = time.time()

    def take(self) -> dict[str, float]:
        """Metrics of the time since the last call. Disk and memory are those of the node with the least
        left."""
        newest = newest_lines(self.run_dir / NODES)
        samples = [sample for sample in newest if sample["unix_s"] >= self._since]
        self._since = time.time()
        memory = psutil.virtual_memory()
        free = [shutil.disk_usage(self.run_dir).free, *column(samples, "disk_free_bytes")]
        used = [1 - memory.available / memory.total, *column(samples, "memory_fraction")]
        metrics = {"perf/disk_free_gib": min(free) / 2**30, "perf/host_memory_fraction": max(used)}
        gpus = []
        if samples:
            metrics["perf/shm_free_gib"] = min(column(samples, "shm_free_bytes")) / 2**30
            sent = 0
            for sample in samples:
                gpus += sample["gpus"]
                rates = sample["bytes_per_s"]
                sent += rates.get("network_out", 0) + rates.get("infiniband_out", 0)
            metrics["perf/network_gbit_per_s"] = sent / len(samples) * 8e-9
        if gpus:
            metrics |= {
                "perf/gpu_busy_fraction": statistics.mean(column(gpus, "busy_fraction")),
                "perf/gpu_memory_gib_max": max(column(gpus, "memory_bytes")) / 2**30,
                "perf/gpu_power_w": statistics.mean(column(gpus, "power_w")),
                "perf/gpu_temperature_c_max": max(column(gpus, "temperature_c")),
                "perf/gpu_slowed_fraction": statistics.mean(bool(gpu["slowdown"] & SLOWED) for gpu in gpus),
            }
        return metrics


class NodeMonitor:
    """Samples one node, with its GPUs if pynvml finds a driver."""

    def __init__(self, rank: int, run_dir: str | Path, beacons: Path) -> None:
        self.rank = rank
        self.run_dir = Path(run_dir)
        self.beacons = beacons
        self._next = 0.0
        self._bytes = _traffic()
        self._files: dict[int, int] = {}
        self._at = time.monotonic()
        self._nvml: Any = None
        self._own: list[int] = []
        with contextlib.suppress(Exception):  # no driver, or none that this library knows
            import pynvml

            pynvml.nvmlInit()
            self._own = nvml_positions(pynvml)
            self._nvml = pynvml

    def due(self) -> dict[str, Any] | None:
        """A sample if one is due, else None."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + EVERY_S
        return self.sample()

    def sample(self) -> dict[str, Any]:
        """One reading of everything; rates are over the time since the last one."""
        now = time.monotonic()
        traffic = _traffic()
        seconds = max(now - self._at, 1e-3)
        rates = {}
        for name, count in traffic.items():
            rates[name] = round((count - self._bytes.get(name, 0)) / seconds)
        files = _file_bytes()
        written = sum(count - self._files.get(pid, 0) for pid, count in files.items())
        rates["files"] = round(written / seconds)
        self._at = now
        self._bytes = traffic
        self._files = files
        waits = {}
        pieces = 0
        for rank in beacon.read_beacons(self.beacons):
            waits[str(rank.rank)] = [rank.calls, rank.waited_s]
            pieces += rank.pieces
        servers = []
        for wait in server_waits.read_waits(self.beacons):
            servers.append({"kind": wait.kind, "what": wait.what, "tell": str(wait) if wait.notable else ""})
        # The run's folder may not be there yet: its nearest parent is on the same disk.
        existing = self.run_dir.absolute()
        while not existing.exists():
            existing = existing.parent
        memory = psutil.virtual_memory()
        shm = Path("/dev/shm")
        return {
            "node": self.rank,
            "unix_s": time.time(),
            "cpu_fraction": psutil.cpu_percent() / 100,
            "memory_fraction": 1 - memory.available / memory.total,
            "shm_free_bytes": shutil.disk_usage(shm).free if shm.is_dir() else 0,
            "disk_free_bytes": shutil.disk_usage(existing).free,
            "bytes_per_s": rates,
            "gpus": self._gpus(),
            "ranks": waits,
            "pieces": pieces,
            "waits": servers,
        }

    def _gpus(self) -> list[dict[str, Any]]:
        nvml = self._nvml
        if nvml is None:
            return []
        gpus = []
        for index in self._own:
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                use = nvml.nvmlDeviceGetUtilizationRates(handle)
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                gpus.append(
                    {
                        "gpu": index,
                        "busy_fraction": use.gpu / 100,
                        "memory_bytes": memory.used,
                        "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                        "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                        "slowdown": nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
                    }
                )
        return gpus


def _traffic(infiniband: Path = Path("/sys/class/infiniband")) -> dict[str, int]:
    """Bytes in and out so far, of all interfaces but loopback together, and of InfiniBand."""
    counts = {"network_in": 0, "network_out": 0}
    for name, card in psutil.net_io_counters(pernic=True).items():
        if name != "lo":
            counts["network_in"] += card.bytes_recv
            counts["network_out"] += card.bytes_sent
    for name, counter in (("infiniband_in", "port_rcv_data"), ("infiniband_out", "port_xmit_data")):
        words = 0
        for path in infiniband.glob(f"*/ports/*/counters/{counter}"):
            with contextlib.suppress(OSError, ValueError):
                words += int(path.read_text())
        if words:
            counts[name] = 4 * words  # the counters count words of four bytes
    return counts


def _file_bytes() -> dict[int, int]:
    """Bytes that the job's processes on this node have read and written in files so far, by process id. Ray
    names its actors after what they run. The driver is a child of the process that supervises the job."""
    job: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            name = process.name()
            if name.startswith("ray::") and not name.startswith(RAYS_OWN):
                job.append(process)
            if name.startswith("ray::Job"):
                job += process.children(recursive=True)
    counts = {}
    for process in job:
        with contextlib.suppress(psutil.Error, OSError):
            io = process.io_counters()
            counts[process.pid] = io.read_chars + io.write_chars + io.read_bytes
    return counts


def append_sample(run_dir: str | Path, sample: Mapping[str, Any]) -> None:
    """Adds a sample to the run's `nodes.jsonl` in one write. A line that a full disk cut short is taken back,
    so that the next one does not begin in its middle."""
    line = json.dumps(sample, sort_keys=True).encode() + b"\n"
    descriptor = os.open(Path(run_dir) / NODES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        written = os.write(descriptor, line)
        if written < len(line):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
    finally:
        os.close(descriptor)


class Stragglers:
    """Finds the rank for which the others wait, from samples of all nodes. A straggler waits least itself."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[float, float, int]] = {}
        self._last: dict[int, tuple[float, float, int]] = {}

    def look(self, sample: Mapping[str, Any]) -> str:
        """Adds a sample. Returns one line about a straggler at the end of a window, else ""."""
        for rank, (_, waited) in sample["ranks"].items():
            point = (sample["unix_s"], waited, sample["node"])
            self._first.setdefault(int(rank), point)
            self._last[int(rank)] = point
        spans = [self._last[r][0] - self._first[r][0] for r in self._first]
        if len(spans) < 2 or min(spans) < WINDOW_S:
            return ""
        shares = {}
        nodes = {}
        for rank, (began, waited_before, _) in self._first.items():
            ended, waited, node = self._last[rank]
            nodes[rank] = node
            shares[rank] = (waited - waited_before) / (ended - began)
        self._first = dict(self._last)
        return straggler(shares, nodes)


def straggler(shares: Mapping[int, float], nodes: Mapping[int, int]) -> str:
    """One line if a rank waits in collectives for much less of the time than the others, else ""."""
    least = min(shares, key=lambda r: shares[r])
    others = [share for rank, share in shares.items() if rank != least]
    usual = statistics.median(others)
    if usual - shares[least] < STRAGGLES:
        return ""
    return (
        f"rank {least} on node {nodes[least]} keeps the others waiting: "
        f"in collectives they wait {usual:.0%} of the time, it {shares[least]:.0%}"
    )
