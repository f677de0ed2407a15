"""Limits of memory and processors, from trees of control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.hardware import cgroups
from trainer.hardware.host_memory import available_memory


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


LEAF = "sys/fs/cgroup/slurm/job_7"


@pytest.mark.parametrize(
    ("group", "files", "left"),
    [
        ("0::/", {"sys/fs/cgroup/memory.max": "3000000", "sys/fs/cgroup/memory.current": "1000000"}, 2000000),
        (  # pages of files are dropped
            "0::/",
            {
                "sys/fs/cgroup/memory.max": "3000000",
                "sys/fs/cgroup/memory.current": "1000000",
                "sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 500000\n",
            },
            2500000,
        ),
        ("0::/", {"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "1"}, None),
        (  # a limit above the process's own group
            "0::/slurm/job_7/step_0",
            {
                f"{LEAF}/memory.max": "3000000",
                f"{LEAF}/memory.current": "1000000",
                f"{LEAF}/step_0/memory.max": "max",
            },
            2000000,
        ),
        (
            "9:memory:/slurm/job_7\n3:cpu,cpuacct:/",
            {
                "sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": "300000000",
                "sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes": "100000000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
            },
            200000000,
        ),
        (  # version 1 in a container, which sees its own group as the root
            "9:memory:/docker/abc",
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "300000000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "100000000",
            },
            200000000,
        ),
        ("", {}, None),
    ],
)
def test_memory_is_what_the_groups_leave(tmp_path, group, files, left):
    write(tmp_path, "proc/self/cgroup", group)
    for name, text in files.items():
        write(tmp_path, name, text)
    assert cgroups.memory_left(tmp_path) == left
    assert left is None or available_memory(tmp_path) == left


@pytest.mark.parametrize(
    ("group", "files", "cpus"),
    [
        (
            "0::/a/b",
            {"sys/fs/cgroup/a/cpu.max": "10000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 100000"},
            0.1,
        ),
        (
            "4:cpu,cpuacct:/a",
            {
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            },
            0.5,
        ),
        ("0::/", {"sys/fs/cgroup/cpu.max": "max 100000"}, None),
    ],
)
def test_processors_are_what_the_groups_quotas_leave(tmp_path, group, files, cpus):
    write(tmp_path, "proc/self/cgroup", group)
    for name, text in files.items():
        write(tmp_path, name, text)
    assert cgroups.cpus_allowed(tmp_path) == cpus
