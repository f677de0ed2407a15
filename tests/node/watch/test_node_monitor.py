"""What a node is doing: its samples, a step's metrics made of them, and the rank that the others wait for."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.metric_table import unknown_names
from trainer.node.watch import watchdog
from trainer.observe.node_monitor import NodeMonitor, NodeStats, Stragglers, append_sample, straggler

WRITES = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, sys.argv[1][:15].encode())
file = open(sys.argv[2], "wb", buffering=0)
while True:
    file.seek(0)
    file.write(bytes(1 << 17))
    time.sleep(0.01)
"""


def test_the_rank_that_waits_least_is_the_straggler():
    nodes = {0: 0, 1: 0, 2: 1, 3: 1}
    assert straggler({0: 0.5, 1: 0.52, 2: 0.05, 3: 0.48}, nodes) == (
        "rank 2 on node 1 keeps the others waiting: in collectives they wait 50% of the time, it 5%"
    )
    assert straggler({0: 0.5, 1: 0.45, 2: 0.4, 3: 0.48}, nodes) == ""
    watch = Stragglers()
    first = [{"node": n, "unix_s": 100.0, "ranks": {str(n): [1, 0.0]}} for n in (0, 1)]
    later = [{"node": n, "unix_s": 140.0, "ranks": {str(n): [9, w]}} for n, w in ((0, 30.0), (1, 1.0))]
    line = straggler({0: 0.75, 1: 0.025}, {0: 0, 1: 1})
    assert [watch.look(s) for s in first + later] == ["", "", "", line]


def test_a_steps_metrics_hold_all_nodes_and_the_worst_of_them(tmp_path):
    stats = NodeStats(tmp_path)
    assert set(stats.take()) == {"perf/disk_free_gib", "perf/host_memory_fraction"}  # without a launcher
    gpu = {"gpu": 0, "busy_fraction": 0.5, "memory_bytes": 2**30, "power_w": 300.0, "temperature_c": 50}
    gpu["slowdown"] = 4
    for node, (free, hot) in enumerate([(9 << 30, 50), (2**29, 91)]):
        mine = gpu | {"temperature_c": hot, "busy_fraction": 1.0 - node, "slowdown": 64 * node}
        sample = {"node": node, "unix_s": time.time(), "disk_free_bytes": free, "gpus": [gpu, mine]}
        sample |= {"memory_fraction": 0.999 * node, "shm_free_bytes": (8 - node) << 30}
        sample["bytes_per_s"] = {"network_out": 5e8, "infiniband_out": 2e9}
        append_sample(tmp_path, sample)
    found = stats.take()
    assert found["perf/disk_free_gib"] == 0.5 and found["perf/host_memory_fraction"] == 0.999
    assert found["perf/shm_free_gib"] == 7.0 and found["perf/network_gbit_per_s"] == pytest.approx(20.0)
    assert found["perf/gpu_temperature_c_max"] == 91 and found["perf/gpu_slowed_fraction"] == 0.25
    assert found["perf/gpu_busy_fraction"] == 0.5 and not unknown_names(set(found))
    assert set(stats.take()) == {"perf/disk_free_gib", "perf/host_memory_fraction"}  # each sample counts once


def test_the_job_s_own_file_traffic_is_counted(tmp_path):
    """A process that is named as Ray names its actors, beside one that is not."""
    start = ["bash", "-c", 'exec -a "$0" "$@"']
    named = [
        subprocess.Popen([*start, name, sys.executable, "-c", WRITES, name, str(tmp_path / "file")])
        for name in ("ray::Worker.load", "ray::DashboardAgent")
    ]
    try:
        monitor = NodeMonitor(0, tmp_path, tmp_path)
        deadline = time.monotonic() + 20
        while monitor.sample()["bytes_per_s"]["files"] < watchdog.MOVES:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        named[0].kill()
        named[0].wait()
        time.sleep(0.2)
        monitor.sample()
        time.sleep(0.3)
        assert monitor.sample()["bytes_per_s"]["files"] == 0
    finally:
        for process in named:
            process.kill()
            process.wait()
