"""The host itself: memory, shared memory, limits, disks, packages and data. Measures, then checks by pure
functions."""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainer.checkpoint.layout import held_bytes, local_dir
from trainer.config import ConfigError, RunConfig, by_model
from trainer.config.budget import CHECKPOINT_BYTES_PER_PARAMETER, checkpoints_bytes, downloaded_bytes, trained
from trainer.hardware import cgroups, verbs
from trainer.hardware.host_memory import available_memory, worker_bytes
from trainer.hardware.model_shapes import shape_of
from trainer.hardware.visible_gpus import gpu_names, visible_positions
from trainer.node.preflight import compiler, infiniband, thresholds
from trainer.node.preflight.findings import Finding, judged
from trainer.node.topology import NodeEnvironment

GIB = 1 << 30
RANK_FILES = 8192
"""Open files that a rank on a GPU needs, with its share of Ray's."""
MIN_NEW_FILES = 4096
"""Files that a run's checkpoints, or Ray's session, need room for."""
LEAST_CPUS = 0.5
"""Processors a rank below which a run is not started."""
SPEED_BYTES = 64 << 20
"""Written and flushed to measure a disk."""
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "lustre", "ceph", "fuse", "gpfs", "beegfs", "cifs", "9p", "virtiofs")


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A folder that the run writes to."""

    purpose: str
    path: str
    device: int
    """Folders with the same number share their space."""
    filesystem: str
    free_bytes: int
    need_bytes: int
    write_bytes_per_s: float
    """0 where it was not measured."""
    free_files: int = -1
    """Files that can still be made; -1 where the file system has no limit of them."""
    writable: bool = True
    """Whether this process may write there; root may not either on a disk that is mounted read-only."""


@dataclass(frozen=True, kw_only=True)
class MeasuredHost:
    """What was measured of this machine."""

    gpus: int | None
    """Visible GPUs; None without a tool that counts them."""
    shm_bytes: int
    """Free space in /dev/shm."""
    memory_bytes: int
    """Host memory available."""
    disks: tuple[Disk, ...]
    files: int
    """Hard limit of open files."""
    processes: int
    """Hard limit of processes and threads of this user; -1 for none."""
    locked_bytes: int = -1
    """Hard limit of memory that may be pinned; -1 for none."""
    infiniband: bool = False
    """Whether there is a device that needs pinned memory."""
    lacks_verbs: tuple[str, ...] = ()
    """Libraries without which NCCL does not use that device."""
    lacks: tuple[str, ...] = ()
    """What Triton would not find here, on a machine with GPUs."""
    cpus: float = math.inf
    """Processors that the processes of this node may use."""
    loopback: bool = True
    """Whether processes of this machine reach each other at 127.0.0.1."""


def measure_host(config: RunConfig, env: Mapping[str, str] = os.environ, alone: bool = False) -> MeasuredHost:
    """Measures this machine. alone: without a model or data, as in a preflight."""
    shm = Path("/dev/shm")
    return MeasuredHost(
        gpus=count_gpus(env) if config.placement.device == "cuda" else 0,
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else 0,
        memory_bytes=available_memory(),
        disks=tuple(measure_disks(disk_needs(config, env, alone))),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[1],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],
        lacks=tuple(compiler.missing_compiler_parts(env)) if config.placement.device == "cuda" else (),
        infiniband=verbs.DEVICES.is_dir() and any(verbs.DEVICES.iterdir()),
        lacks_verbs=tuple(verbs.missing_libraries()) if env.get("NCCL_IB_DISABLE") != "1" else (),
        cpus=cgroups.cpus(),
        loopback=loopback_answers(),
    )


def loopback_answers() -> bool:
    """Whether a connection to 127.0.0.1 comes through."""
    with socket.socket() as server:
        server.settimeout(2.0)
        try:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            with socket.create_connection(server.getsockname(), timeout=2.0):
                return True
        except OSError:
            return False


def count_gpus(env: Mapping[str, str] = os.environ) -> int | None:
    """GPUs that a process here sees; None if neither nvidia-smi nor rocm-smi is installed and none is
    named."""
    names = gpu_names(env)
    if shutil.which("nvidia-smi"):
        ids: list[list[str]] = []
        for line in _printed_lines(["nvidia-smi", "-L"]):
            if re.match(r"GPU \d", line):
                ids.append([])
            if ids:  # a GPU's line, or one of its MIG instances
                ids[-1] += re.findall(r"\(UUID: ([^)]+)\)", line)
        return len(visible_positions(ids, env))
    if names is not None:
        return len(names)
    if shutil.which("rocm-smi"):
        return len([line for line in _printed_lines(["rocm-smi", "--showid"]) if "Device Name" in line])
    return None


def _printed_lines(command: list[str]) -> list[str]:
    """What a driver's tool prints; nothing where it fails or hangs: no GPU of this node can be used."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout.splitlines()
    except subprocess.SubprocessError:
        return []


# --- disks ----------------------------------------------------------------------------------------------


def parameters_of(config: RunConfig) -> tuple[int, int]:
    """Parameters of a known hub model or of a local folder with a config.json, and how many are trained; 0:
    unknown."""
    try:
        shape = shape_of(config.model.path)
    except (ConfigError, KeyError, ValueError):
        return 0, 0
    return (shape.parameters, trained(config, shape)) if shape else (0, 0)


def disk_needs(config: RunConfig, env: Mapping[str, str], alone: bool) -> list[tuple[str, Path, int]]:
    """(purpose, folder, bytes) that the run will write on a node. What earlier attempts wrote counts as
    free."""
    learning = 0 if alone else parameters_of(config)[1]
    held = held_bytes(local_dir(config))
    checkpoints = checkpoints_bytes(config, learning, held) - held
    free_after = int(thresholds.FREE_DISK_GIB.value * GIB)
    needs = [("run", Path(config.run.dir).absolute(), free_after + max(0, checkpoints))]
    hub = Path(env.get("HF_HOME") or Path.home() / ".cache/huggingface").absolute()
    for purpose, one in zip(("model cache", "teacher cache"), by_model(config), strict=False):
        known = 0 if alone else parameters_of(one)[0]
        if known and not Path(one.model.path).exists():
            cached = hub / "hub" / ("models--" + one.model.path.replace("/", "--")) / "snapshots"
            size = int(downloaded_bytes(one, 2 * known, config.checkpoint.shared_files))
            needs.append((purpose, hub, 0 if cached.is_dir() else size))
    needs.append(("Ray's temporary folder", Path(env.get("SPOTRL_TMP") or env.get("TMPDIR") or "/tmp"), GIB))
    return needs


def measure_disks(needs: Iterable[tuple[str, Path, int]]) -> Iterator[Disk]:
    """Space and speed of the file systems that hold the folders, which need not exist yet; of each the speed
    once."""
    speeds: dict[int, float] = {}
    for purpose, path, need_bytes in needs:
        existing = path
        while not existing.exists():
            existing = existing.parent
        free = shutil.disk_usage(existing).free
        files = os.statvfs(existing)
        device = existing.stat().st_dev
        if device not in speeds:
            speeds[device] = write_speed(existing) if free > 4 * SPEED_BYTES else 0.0
        mounts = []
        for m in psutil.disk_partitions(all=True):
            if existing.resolve().is_relative_to(m.mountpoint):
                mounts.append(m)

        kind = max(mounts, key=lambda m: len(m.mountpoint)).fstype if mounts else ""
        yield Disk(
            purpose=purpose,
            path=str(path),
            device=device,
            filesystem=kind,
            free_bytes=free,
            need_bytes=need_bytes,
            write_bytes_per_s=speeds[device],
            free_files=files.f_favail if files.f_files else -1,
            writable=os.access(existing, os.W_OK),
        )


def write_speed(folder: Path) -> float:
    """Bytes per second of one file, flushed to the disk; 0 where it cannot be written."""
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.monotonic()
            for _ in range(SPEED_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return SPEED_BYTES / (time.monotonic() - began)
    except OSError:
        return 0.0


# --- checks ---------------------------------------------------------------------------------------------


def check_host(
    config: RunConfig, node: NodeEnvironment, host: MeasuredHost | None = None, alone: bool = False
) -> list[Finding]:
    """All findings of this node; pure when `host` is given."""
    host = host or measure_host(config, alone=alone)
    cuda = config.placement.device == "cuda"
    ranks = config.processes_per_node
    shm, memory = shm_bytes(config), memory_bytes(config)
    files = RANK_FILES * ranks if cuda else 1024
    rows = [
        (
            "shared memory",
            host.shm_bytes < shm and f"/dev/shm has {_gib(host.shm_bytes)} free and {_gib(shm)} are needed",
            _gib(host.shm_bytes),
            _gib(shm),
            "start the container with a larger --shm-size (Kubernetes: an emptyDir in memory)",
        ),
        (
            "memory",
            host.memory_bytes < memory
            and f"{_gib(host.memory_bytes)} of memory are available and {_gib(memory)} are needed",
            _gib(host.memory_bytes),
            _gib(memory),
            "use larger nodes, or fewer placement.workers_per_node",
        ),
        (
            "open files",
            0 <= host.files < files and f"only {host.files} files may be open",
            _count(host.files),
            str(files),
            f"raise the hard limit to {files} (ulimit -Hn; docker: --ulimit nofile)",
        ),
        (
            "processes",
            0 <= host.processes < 1024 * ranks and f"only {host.processes} processes may be started",
            _count(host.processes),
            str(1024 * ranks),
            f"raise the hard limit to {1024 * ranks} (ulimit -Hu)",
        ),
        (
            "loopback",
            not host.loopback
            and "127.0.0.1 does not answer: Ray's and torch's processes find each other there",
            "127.0.0.1 answers",
            "",
            "ip link set lo up",
        ),
    ]
    if host.infiniband and node.nodes > 1:
        locked = f"only {host.locked_bytes} bytes may be pinned and there is an InfiniBand device"
        rows.append(
            (
                "pinned memory",
                0 <= host.locked_bytes < 1 << 40 and locked,
                _count(host.locked_bytes),
                str(1 << 40),
                "docker: --ulimit memlock=-1:-1",
            )
        )
        if cuda:
            rows.append(("InfiniBand's library", *infiniband.library_row(host.lacks_verbs)))
    if cuda:
        rows.append(("compiler", *compiler.compiler_row(host.lacks)))
    here = (node.rank,)
    found = _gpu_count(config, node, host)
    for check, wrong, figure, target, remedy in rows:
        found.append(judged(check, here, str(wrong or ""), figure, target, remedy))
    found.append(_processors(config, host.cpus, here))
    return found + _disks(config, node, host.disks, alone) + ([] if alone else _paths(config, node))


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _count(number: int) -> str:
    return "no limit" if number < 0 else str(number)


def _processors(config: RunConfig, cpus: float, here: tuple[int, ...]) -> Finding:
    """A rank that has less than half a processor keeps its GPU waiting, and misses heartbeats."""
    ranks = config.processes_per_node
    few = f"its {ranks} ranks may use {cpus:.3g} processors (affinity and the control groups' CPU quota)"
    return judged(
        "processors",
        here,
        few if cpus < ranks else "",
        f"{cpus:.3g}",
        f"{ranks}, one a rank",
        "ask the platform for more CPUs (cluster.cpus), or raise the container's CPU quota",
        level="fail" if cpus < LEAST_CPUS * ranks else "warn",
    )


def _gpu_count(config: RunConfig, node: NodeEnvironment, host: MeasuredHost) -> list[Finding]:
    if config.placement.device == "cpu":
        return []
    wanted = config.processes_per_node
    rank = (node.rank,)
    if host.gpus is None:
        figure = "no nvidia-smi or rocm-smi here"
        remedy = "install the GPU driver, or use a GPU image"
        return [Finding(check="GPUs", nodes=rank, level="fail", figure=figure, remedy=remedy, machine=False)]
    if host.gpus < wanted:
        whole = node.gpus_per_node is not None and node.gpus_per_node >= wanted
        remedy = (
            "another node is needed: a GPU has dropped out"
            if whole
            else "ask the platform for more, or lower it"
        )
        asked = "placement.workers_per_node is"
        if config.fleet.gpus_per_node:
            asked = "placement.workers_per_node and fleet.gpus_per_node are together"
        what = f"{host.gpus} GPUs are visible and {asked} {wanted}"
        return [Finding(check="GPUs", nodes=rank, level="fail", figure=what, remedy=remedy, machine=whole)]
    return [Finding(check="GPUs", nodes=rank, figure=str(host.gpus), target=str(wanted))]


def _disks(config: RunConfig, node: NodeEnvironment, disks: tuple[Disk, ...], alone: bool) -> list[Finding]:
    found = []
    rank = (node.rank,)
    by_device: dict[int, list[Disk]] = {}
    for disk in disks:
        by_device.setdefault(disk.device, []).append(disk)
    for shared in by_device.values():
        need = sum(disk.need_bytes for disk in shared)
        free = min(disk.free_bytes for disk in shared)
        what = " and ".join(disk.purpose for disk in shared)
        if free >= need:
            figure = f"{free / GIB:.0f} GiB for {what}"
            found.append(
                Finding(check="disk space", nodes=rank, figure=figure, target=f"{need / GIB:.0f} GiB")
            )
            continue
        figure = (
            f"{free / GIB:.1f} GiB are free for {what} ({shared[0].path}) and {need / GIB:.1f} are needed"
        )
        remedy = (
            "free some, lower checkpoint.keep_last, or set run.dir, HF_HOME and SPOTRL_TMP to a larger disk"
        )
        found.append(Finding(check="disk space", nodes=rank, level="fail", figure=figure, remedy=remedy))
    for disk in disks:
        if disk.need_bytes and 0 <= disk.free_files < MIN_NEW_FILES:
            figure = f"{disk.path} has room for {disk.free_files} more files ({disk.purpose})"
            remedy = "remove small files there (df -i), or set run.dir, HF_HOME or SPOTRL_TMP to another disk"
            found.append(Finding(check="disk space", nodes=rank, level="fail", figure=figure, remedy=remedy))
        if disk.need_bytes and not disk.writable:  # a model that is there may be on a disk to read from
            figure = f"{disk.path} cannot be written ({disk.purpose})"
            remedy = "mount it writable, or set run.dir, HF_HOME or SPOTRL_TMP to another disk"
            found.append(Finding(check="disk space", nodes=rank, level="fail", figure=figure, remedy=remedy))
        if disk.purpose.startswith("Ray") and disk.filesystem.startswith(NETWORK_FILESYSTEMS):
            figure = f"{disk.purpose} {disk.path} is on {disk.filesystem}, over the network"
            remedy = "set SPOTRL_TMP to a local disk"
            found.append(Finding(check="local disk", nodes=rank, level="warn", figure=figure, remedy=remedy))
        if disk.write_bytes_per_s:
            found.append(_disk_speed(config, disk, rank, alone))
    return found


def _disk_speed(config: RunConfig, disk: Disk, rank: tuple[int, ...], alone: bool) -> Finding:
    speed = disk.write_bytes_per_s
    limit = thresholds.CHECKPOINT_WRITE_S.value
    what = "a checkpoint"
    size = 0.0
    match disk.purpose:
        case "run":
            parameters = 0 if alone else parameters_of(config)[1]
            size = parameters * CHECKPOINT_BYTES_PER_PARAMETER / config.placement.nodes
        case "model cache":
            what = "the model"
            size = disk.need_bytes
        case _:
            what = "what is spilled in that time"
            size = thresholds.SPILL_MB_PER_S.value * 1e6 * limit
    figure = f"{disk.purpose}: {speed / 1e6:.0f} MB/s"
    target = f"{what} in {limit:.0f} s"
    if size <= speed * limit:
        return Finding(check="disk speed", nodes=rank, figure=figure, target=target)
    figure = f"{disk.path} takes {speed / 1e6:.0f} MB/s: {what} would take {size / speed:.0f} s to write"
    remedy = "set run.dir, HF_HOME or SPOTRL_TMP to a faster, local disk"
    return Finding(check="disk speed", nodes=rank, level="warn", figure=figure, target=target, remedy=remedy)


def shm_bytes(config: RunConfig) -> int:
    """Bytes of shared memory: NCCL's buffers where several ranks of a node have GPUs. Ray's object store
    takes what is left, and goes to a disk where that is too little."""
    several = config.placement.device == "cuda" and config.processes_per_node > 1
    return (GIB // 4) * config.processes_per_node if several else 0


def memory_bytes(config: RunConfig) -> int:
    """Bytes of host memory that the processes of a node take before any model."""
    each = worker_bytes(config.placement.device, config.data.image_cache_gib)
    return each * config.processes_per_node


def _paths(config: RunConfig, node: NodeEnvironment) -> list[Finding]:
    """Local paths that every node reads. Hub ids and URLs are looked up where they are used."""
    found = []
    named = [("model.path", config.model.path), ("data.path", config.data.path)]
    named += [("algorithm.teacher", config.algorithm.teacher)] if config.teaches else []
    for name, path in named:
        if path.startswith(("/", "./", "../", "~")):
            here = Path(path).expanduser().exists()
            found.append(
                Finding(check="files", nodes=(node.rank,), figure=name)
                if here
                else Finding(
                    check="files",
                    nodes=(node.rank,),
                    level="fail",
                    figure=f"{name} {path} is not on this node",
                    remedy="copy it to every node, or give a URL",
                )
            )
    return found
