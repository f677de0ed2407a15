"""Limits of memory and processors that hold for this process: those of its control group and of all above it.

A container shows its own group as the root of /sys/fs/cgroup. A Slurm step, a systemd unit or a container
that shares its host's namespace lies deeper, in the tree of version 2 or, per controller, of version 1; the
group's path stands in /proc/self/cgroup.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

NO_LIMIT = 1 << 60
"""Version 1 writes "no limit" as the largest number of whole pages."""


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take under its groups' limits; None without a limit."""
    least: int | None = None
    for folder in _groups("memory", root):
        for names in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _number(folder / names[0])
            used = _number(folder / names[1])
            if limit is None or used is None or limit >= NO_LIMIT:
                continue
            left = max(0, limit - used + _droppable(folder, names[2]))
            least = left if least is None else min(least, left)
    return least


def cpus_allowed(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that this process may take under its groups' quotas; None without a quota."""
    least: float | None = None
    for folder in _groups("cpu", root):
        text = _text(folder / "cpu.max").split()
        quota = _number(folder / "cpu.cfs_quota_us")
        period = _number(folder / "cpu.cfs_period_us")
        if len(text) == 2 and text[0].isdigit() and text[1].isdigit():
            quota, period = int(text[0]), int(text[1])
        if quota is not None and period and quota > 0:
            share = quota / period
            least = share if least is None else min(least, share)
    return least


def cpus(root: Path = Path("/")) -> float:
    """Processors that this process can use: those it is bound to, within its groups' quotas."""
    bound = float(len(os.sched_getaffinity(0)))
    allowed = cpus_allowed(root)
    return bound if allowed is None else min(bound, allowed)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of this process's group for a controller and of all groups above it, of both versions."""
    mount = root / "sys/fs/cgroup"
    tops = {mount: "/"}  # inside a container the group may be called by its host's path, which is not here
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            tops[mount] = path
            tops[mount / "unified"] = path
        elif controller in controllers.split(","):
            tops[mount / controllers] = path
            tops[mount / controller] = path
    for top, path in tops.items():
        folder = top / path.strip("/")
        while folder.is_relative_to(top):
            yield folder
            folder = folder.parent
        if (top / controller).is_dir() and top == mount:
            yield top / controller


def _droppable(folder: Path, name: str) -> int:
    """Bytes of file pages that count as used and that the kernel drops when memory is asked for."""
    for line in _text(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.removeprefix("-").isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
