"""The host itself: memory, shared memory, limits, disks and paths; measured, then checked."""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
import socket
import subprocess
import sysconfig
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
from trainer.node.preflight import thresholds
from trainer.node.preflight.findings import DISKS, Finding, judged
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
COMPILERS = ("gcc", "clang", "cc")
"""What Triton looks for, where CC names none."""
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
        lacks=tuple(missing_compiler_parts(env)) if config.placement.device == "cuda" else (),
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


def missing_compiler_parts(env: Mapping[str, str] = os.environ, include: str = "") -> list[str]:
    """What Triton lacks here to build its launchers, in words: they are C, compiled against this Python when
    a kernel first runs. include: Python's headers, if not this one's."""
    lacks = []
    names = [env["CC"]] if env.get("CC") else COMPILERS
    if not any(shutil.which(name, path=env.get("PATH")) for name in names):
        lacks.append(f"no C compiler ({' or '.join(names)})")
    headers = Path(include or sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        lacks.append(f"no Python.h in {headers}")
    return lacks


def count_gpus(env: Mapping[str, str] = os.environ) -> int | None:
    """GPUs that a process here sees; None without nvidia-smi, rocm-smi and a variable that names some."""
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
    """Parameters of a hub model or a local folder, and how many are trained; 0: unknown."""
    try:
        shape = shape_of(config.model.path)
    except (ConfigError, KeyError, ValueError):
        return 0, 0
    return (shape.parameters, trained(config, shape)) if shape else (0, 0)


def disk_needs(config: RunConfig, env: Mapping[str, str], alone: bool) -> list[tuple[str, Path, int]]:
    """(purpose, folder, bytes) that the run will write. What earlier attempts wrote counts as free."""
    learning = 0 if alone else parameters_of(config)[1]
    held = held_bytes(local_dir(config))
    checkpoints = checkpoints_bytes(config, learning, held) - held
    free_after = int(thresholds.FREE_DISK_GIB * GIB)
    needs = [("run", Path(config.run.dir).absolute(), free_after + max(0, checkpoints))]
    hub = Path(env.get("HF_HOME") or Path.home() / ".cache/huggingface").absolute()
    for purpose, own in zip(("model cache", "teacher cache"), by_model(config), strict=False):
        known = 0 if alone else parameters_of(own)[0]
        if known and not Path(own.model.path).exists():
            cached = hub / "hub" / ("models--" + own.model.path.replace("/", "--")) / "snapshots"
            size = int(downloaded_bytes(own, 2 * known, config.checkpoint.shared_files))
            needs.append((purpose, hub, 0 if cached.is_dir() else size))
    needs.append(("Ray's temporary folder", Path(env.get("SPOTRL_TMP") or env.get("TMPDIR") or "/tmp"), GIB))
    return needs


def measure_disks(needs: Iterable[tuple[str, Path, int]]) -> Iterator[Disk]:
    """Space of the folders' file systems, which need not exist yet, and once the speed of each."""
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
        mounts = [m for m in psutil.disk_partitions(True) if existing.resolve().is_relative_to(m.mountpoint)]
        yield Disk(
            purpose=purpose,
            path=str(path),
            device=device,
            filesystem=max(mounts, key=lambda m: len(m.mountpoint)).fstype if mounts else "",
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
    here = (node.rank,)
    shm, memory = shm_bytes(config), memory_bytes(config)
    files = RANK_FILES * ranks if cuda else 1024
    lacks = f"/dev/shm has {_gib(host.shm_bytes)} free and {_gib(shm)} are needed"
    little = f"{_gib(host.memory_bytes)} of memory are available and {_gib(memory)} are needed"
    silent = "127.0.0.1 does not answer: Ray's and torch's processes find each other there"
    # A rank that has less than half a processor keeps its GPU waiting, and misses heartbeats.
    few = f"its {ranks} ranks may use {host.cpus:.3g} processors (affinity and the control groups' CPU quota)"
    level = "fail" if host.cpus < LEAST_CPUS * ranks else "warn"
    few = few if host.cpus < ranks else ""
    findings = [
        *_gpu_count(config, node, host),
        judged("shared memory", here, lacks if host.shm_bytes < shm else "", _gib(host.shm_bytes), _gib(shm)),
        judged(
            "memory",
            here,
            little if host.memory_bytes < memory else "",
            _gib(host.memory_bytes),
            _gib(memory),
        ),
        _limit("open files", here, "files may be open", host.files, files, "-Hn; docker: --ulimit nofile"),
        _limit("processes", here, "processes may be started", host.processes, 1024 * ranks, "-Hu"),
        judged("loopback", here, "" if host.loopback else silent, "127.0.0.1 answers"),
        judged("processors", here, few, f"{host.cpus:.3g}", f"{ranks}, one a rank", level=level),
    ]
    if host.infiniband and node.nodes > 1:
        locked = f"only {host.locked_bytes} bytes may be pinned and there is an InfiniBand device"
        wrong = locked if 0 <= host.locked_bytes < 1 << 40 else ""
        findings.append(judged("pinned memory", here, wrong, _count(host.locked_bytes)))
    if host.infiniband and node.nodes > 1 and cuda:
        closed = (
            f"without {' and '.join(host.lacks_verbs)} NCCL trains over TCP, and this machine has InfiniBand"
        )
        remedy = f"put `apt-get install {verbs.PACKAGES}` into the image, or set NCCL_IB_DISABLE=1"
        wrong = closed if host.lacks_verbs else ""
        findings.append(judged("InfiniBand's library", here, wrong, "it opens", remedy=remedy))
    if cuda:
        missing = f"Triton builds its launchers when a kernel first runs: {', '.join(host.lacks)}"
        findings.append(judged("compiler", here, missing if host.lacks else "", "there"))
    return findings + _disks(config, here, host.disks, alone) + ([] if alone else _paths(config, here))


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _count(number: int) -> str:
    return "no limit" if number < 0 else str(number)


def _limit(check: str, here: tuple[int], allowed: str, limit: int, need: int, option: str) -> Finding:
    """A limit of this user's; -1 is none. option: of `ulimit`."""
    wrong = f"only {limit} {allowed}" if 0 <= limit < need else ""
    return judged(
        check, here, wrong, _count(limit), str(need), f"raise the hard limit to {need} (ulimit {option})"
    )


def _gpu_count(config: RunConfig, node: NodeEnvironment, host: MeasuredHost) -> list[Finding]:
    if config.placement.device == "cpu":
        return []
    wanted = config.processes_per_node
    whole = False
    wrong = ""
    if host.gpus is None:
        wrong = "no nvidia-smi or rocm-smi here"
        remedy = "install the GPU driver, or use a GPU image"
    elif host.gpus < wanted:
        whole = node.gpus_per_node is not None and node.gpus_per_node >= wanted
        dropped = "another node is needed: a GPU has dropped out"
        remedy = dropped if whole else "ask the platform for more, or lower it"
        own = " and fleet.gpus_per_node are together" if config.fleet.gpus_per_node else " is"
        wrong = f"{host.gpus} GPUs are visible and placement.workers_per_node{own} {wanted}"
    else:
        remedy = ""
    return [judged("GPUs", (node.rank,), wrong, str(host.gpus), str(wanted), remedy, machine=whole)]


def _disks(config: RunConfig, here: tuple[int], disks: tuple[Disk, ...], alone: bool) -> list[Finding]:
    findings = []
    by_device: dict[int, list[Disk]] = {}
    for disk in disks:
        by_device.setdefault(disk.device, []).append(disk)
    for shared in by_device.values():
        need = sum(disk.need_bytes for disk in shared)
        free = min(disk.free_bytes for disk in shared)
        purposes = " and ".join(disk.purpose for disk in shared)
        lacks = f"{_gib(free)} are free for {purposes} ({shared[0].path}) and {need / GIB:.1f} are needed"
        wrong = lacks if free < need else ""
        figure = f"{free / GIB:.0f} GiB for {purposes}"
        findings.append(judged("disk space", here, wrong, figure, f"{need / GIB:.0f} GiB"))
    for disk in disks:
        if disk.need_bytes and 0 <= disk.free_files < MIN_NEW_FILES:
            figure = f"{disk.path} has room for {disk.free_files} more files ({disk.purpose})"
            remedy = f"remove small files there (df -i), or set {DISKS} to another disk"
            findings.append(judged("disk space", here, figure, remedy=remedy))
        if disk.need_bytes and not disk.writable:  # a model that is there may be on a disk to read from
            figure = f"{disk.path} cannot be written ({disk.purpose})"
            remedy = f"mount it writable, or set {DISKS} to another disk"
            findings.append(judged("disk space", here, figure, remedy=remedy))
        if disk.purpose.startswith("Ray") and disk.filesystem.startswith(NETWORK_FILESYSTEMS):
            figure = f"{disk.purpose} {disk.path} is on {disk.filesystem}, over the network"
            findings.append(judged("local disk", here, figure, level="warn"))
        if disk.write_bytes_per_s:
            findings.append(_disk_speed(config, disk, here, alone))
    return findings


def _disk_speed(config: RunConfig, disk: Disk, here: tuple[int], alone: bool) -> Finding:
    speed = disk.write_bytes_per_s
    limit = thresholds.CHECKPOINT_WRITE_S
    match disk.purpose:
        case "run":
            parameters = 0 if alone else parameters_of(config)[1]
            item, size = "a checkpoint", parameters * CHECKPOINT_BYTES_PER_PARAMETER / config.placement.nodes
        case "model cache":
            item, size = "the model", disk.need_bytes
        case _:
            item, size = "what is spilled in that time", thresholds.SPILL_MB_PER_S * 1e6 * limit
    took = f"{disk.path} takes {speed / 1e6:.0f} MB/s: {item} would take {size / speed:.0f} s to write"
    wrong = took if size > speed * limit else ""
    figure = f"{disk.purpose}: {speed / 1e6:.0f} MB/s"
    return judged("disk speed", here, wrong, figure, f"{item} in {limit:.0f} s", level="warn")


def shm_bytes(config: RunConfig) -> int:
    """Bytes of shared memory: NCCL's buffers where several ranks of a node have GPUs. Ray's object store
    takes what is left, and goes to a disk where that is too little."""
    several = config.placement.device == "cuda" and config.processes_per_node > 1
    return (GIB // 4) * config.processes_per_node if several else 0


def memory_bytes(config: RunConfig) -> int:
    """Bytes of host memory that the processes of a node take before any model."""
    each = worker_bytes(config.placement.device, config.data.image_cache_gib)
    return each * config.processes_per_node


def _paths(config: RunConfig, here: tuple[int]) -> list[Finding]:
    """Local paths that every node reads. Hub ids and URLs are looked up where they are used."""
    findings = []
    paths = {"model.path": config.model.path, "data.path": config.data.path}
    paths |= {"algorithm.teacher": config.algorithm.teacher} if config.teaches else {}
    for name, path in paths.items():
        if path.startswith(("/", "./", "../", "~")):
            wrong = "" if Path(path).expanduser().exists() else f"{name} {path} is not on this node"
            findings.append(judged("files", here, wrong, name))
    return findings
