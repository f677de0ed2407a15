"""Ray's folder stays small however long a run lasts: its servers' logs turn over. Ray itself, telling more
than it ever does in a run, with smaller files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.node.launch import ray_node

LIMIT = 32 << 10
"""Bytes of one file of logs here; a run's is `RAY_ROTATION_MAX_BYTES` of `TUNING`."""


def turn_over() -> None:
    """In a process of its own: a node that closes ends every descendant of its process."""
    told = {"RAY_ROTATION_MAX_BYTES": str(LIMIT), "RAY_BACKEND_LOG_LEVEL": "debug"}
    ports = ray_node.Ports.choose(alone=True)
    ray = ray_node.RayNode(address="127.0.0.1", ports=ports, cpus=1, gpus=0, env=os.environ | told)
    ray.start_head("127.0.0.1")
    logs = ray.ray_folder / "session_latest/logs"
    try:
        deadline = time.monotonic() + 120
        while not ((logs / "gcs_server.out.1").exists() and ray.ready()):
            assert time.monotonic() < deadline, "nothing turned over"
            time.sleep(0.2)
        last = (logs / "gcs_server.out.1").stat().st_mtime
        while (logs / "gcs_server.out.1").stat().st_mtime == last:  # once more, over the one that is kept
            assert time.monotonic() < deadline, "it turned over only once"
            time.sleep(0.2)
        sizes = {path.name: path.stat().st_size for path in logs.iterdir() if path.is_file()}
        assert not [name for name in sizes if name.endswith(".2")]
        # a line is written before the file is turned over
        assert max(sizes.values()) < 2 * LIMIT, sizes
    finally:
        ray.close(keep_logs=False)
    assert not ray.temp.exists()


@pytest.mark.long
def test_rays_servers_keep_two_files_of_logs_each():
    most = int(ray_node.TUNING["RAY_ROTATION_MAX_BYTES"])
    assert 0 < most <= 8 << 20 and ray_node.TUNING["RAY_ROTATION_BACKUP_COUNT"] == "1"
    command = [sys.executable, "-m", "tests.node.launch.test_ray_folder"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    turn_over()
