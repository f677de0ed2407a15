"""The one short all-reduce of a start: the process that each rank is, and what head and worker make of it."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from trainer.node.launch.head import HeadLauncher
from trainer.node.launch.launcher import SPEED_FILE, LaunchEnded
from trainer.node.launch.node_worker import NodeWorkerLauncher
from trainer.node.preflight import findings


def test_a_rank_without_seconds_measures_one_size(tmp_path):
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env = os.environ | ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainer.node.preflight.speed", "--seconds=0", "--device=cpu"]
    done = subprocess.run(
        [*command, f"--out={tmp_path}/out"], env=env, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads((tmp_path / "out").read_text())
    assert done.stdout.count("all-reduce of") == 1 and "16384 KiB" in done.stdout
    assert rank["wrong_between"] is False and "inside_gb_per_s" not in rank


def head(tmp_path, measured, fabric):
    """A head whose ranks have written so much; [] where they never came to an end."""

    def measure_speed(head, port, seconds, check):
        if not measured:
            return "the all-reduce between the ranks did not end: the lines above say why"
        (tmp_path / SPEED_FILE).write_text(json.dumps(measured))
        return ""

    lines, orders = [], []
    launcher = HeadLauncher.__new__(HeadLauncher)
    launcher.__dict__ |= {
        "config": SimpleNamespace(run=SimpleNamespace(dir=str(tmp_path))),
        "others": SimpleNamespace(head_address="10.0.0.1", send=orders.append),
        "node": SimpleNamespace(nodes=2, name_of=str),
        "arguments": SimpleNamespace(preflight=False, seconds=40.0),
        "fabric_gbit_per_s": fabric,
        "measure_speed": measure_speed,
        "say": lines.append,
    } | {"findings": [], "shown": 0, "measured": {}, "check_others": None}
    return launcher, lines, orders


def rank(node, bus):
    wrong = {"wrong": False, "wrong_between": False}
    return {"node": node, "rank": node, "gpu": "", "between_gb_per_s": bus} | wrong


def test_a_start_says_what_it_reached_and_orders_one_short_reduction(tmp_path):
    launcher, lines, orders = head(tmp_path, [rank(0, 350.0), rank(1, 340.0)], 3200.0)
    launcher.time_all_reduce()
    assert orders == [{"kind": "allreduce", "head": "10.0.0.1", "port": 6389, "seconds": 0.0}]
    assert lines[0].startswith("all-reduce between all nodes: 340 GB/s (wanted: 320 GB/s")


@pytest.mark.parametrize("measured", [[], [rank(0, 12.0), rank(1, 12.0)]])
def test_what_the_next_machine_shares_takes_no_other(tmp_path, measured):
    """TCP in place of InfiniBand, and a collective that fails: 2, and no machine is refused for it."""
    launcher, _, _ = head(tmp_path, measured, 3200.0)
    with pytest.raises(LaunchEnded) as end:
        launcher.time_all_reduce()
    assert end.value.code == 2 and not findings.failed_machines(launcher.findings)


def test_a_worker_goes_on_to_the_heads_next_order():
    worker = NodeWorkerLauncher.__new__(NodeWorkerLauncher)
    measured = []
    worker.measure_speed = lambda *a: measured.append(a) or "failed here: the head says so"
    worker.hear = lambda timeout_s, *wanted: {"kind": wanted[0]}
    worker.wait_s = 1.0
    order = {"kind": "allreduce", "head": "h", "port": 1, "seconds": 0.0}
    assert worker.reduce(order) == {"kind": "start"} and measured[0][:3] == ("h", 1, 0.0)
