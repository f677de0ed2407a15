"""The watchdog and the node monitor: judgement on made-up ranks, beacons of real ones, and faults in a real job."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from trainer import config as c
from trainer.node import watchdog
from trainer.node.watchdog import Rank, Watchdog, guilty
from trainer.observe import beacon
from trainer.observe.metrics import Phases
from trainer.observe.node_monitor import NodeMonitor, Stragglers, straggler

ROOT = Path(__file__).parents[2]
STACKS = """Thread 0x1 (most recent call first):
  File "/x/ray/io.py", line 9 in poll

Current thread 0x2 (most recent call first):
  File "/x/trainer/engine/policy.py", line 123 in update
  File "/x/main.py", line 1 in main
"""


def at(
    rank: int, calls: int, inside: bool = True, name: str = "all_reduce", state: str = "S", stacks: str = ""
) -> Rank:
    return Rank(rank // 2, rank, calls, inside, 41.0, name, state, stacks)


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        (
            [at(0, 7), at(1, 7), at(2, 6, False, "all_gather", stacks=STACKS), at(3, 7)],
            "rank 2 on node 1 has not entered all_reduce (collective 7); it is at policy.py:123 in update; "
            "rank 0 waits for it in all_reduce since 41 s",
        ),
        (
            [at(0, 7), at(1, 7, False)],
            "rank 1 on node 0 has not entered all_reduce (collective 7); rank 0 waits for it",
        ),
        ([at(0, 7), at(1, 7, state="T")], "rank 1 on node 0 is stopped (state T); rank 0 waits for it in all_reduce"),
        ([at(0, 7), at(1, 7, state="")], "rank 1 on node 0 is gone"),
        ([at(0, 7), at(1, 7)], "all ranks are in all_reduce (collective 7): the network between them, or a GPU, hangs"),
        (
            [at(0, 7), at(1, 7, name="barrier")],
            "the ranks are in different collectives (rank 0 all_reduce, rank 1 barr",
        ),
        (
            [at(0, 7, False, stacks=STACKS), at(1, 7, False)],
            "all ranks are outside of collectives: rank 0 at policy.py",
        ),
        ([], "no rank reported where it is"),
    ],
)
def test_the_rank_that_has_not_entered_is_the_guilty_one(ranks, line):
    assert guilty(ranks).startswith(line)


def config(tmp_path: Path, **watch) -> c.RunConfig:
    return c.RunConfig(run=c.Run(dir=str(tmp_path)), watch=c.Watch(**watch))


def test_a_phase_is_held_against_three_times_its_median(tmp_path):
    dog = Watchdog(config(tmp_path, floor_s=2.0, first_s=50.0, start_s=70.0))
    assert dog.limit_s("start") == 70.0 and dog.limit_s("update") == 50.0
    lines = [
        json.dumps({"step": s, "time/update_s": t, "time/sync_s": 0.1}) for s, t in enumerate([9.0, 1.0, 1.2, 1.1])
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert dog.limit_s("update") == pytest.approx(3 * 1.15) and dog.limit_s("sync") == 2.0


def test_a_phase_that_lasts_is_told_once(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_S", 0.0)
    dog = Watchdog(config(tmp_path, first_s=0.2))
    assert dog.overdue() == ""
    phases = Phases(tmp_path)
    phases.begin(3, 9)
    with phases("update"):
        assert dog.overdue() == ""
        time.sleep(0.3)
        assert dog.overdue() == "no progress in phase update of step 3 for 0 s (limit 0)"
        assert dog.overdue() == ""
    assert Watchdog(config(tmp_path, first_s=0.2, on_hang="off")).overdue() == ""


RANK = """
import os, sys, time
import torch.distributed as dist
from trainer.observe import beacon
rank = int(sys.argv[1])
beacon.start(rank)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/meet", rank=rank, world_size=2)
import torch
dist.all_reduce(torch.ones(1))
def stuck():
    time.sleep(600)
if rank == 1:
    stuck()
dist.barrier()
"""


def test_real_ranks_say_where_they_are(tmp_path):
    env = os.environ | {beacon.FOLDER_VARIABLE: str(tmp_path), "PYTHONPATH": str(ROOT)}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(r), str(tmp_path)], env=env) for r in (0, 1)]
    try:
        deadline = time.monotonic() + 120
        while [b.calls for b in beacon.read(tmp_path)] != [2, 1]:
            assert time.monotonic() < deadline and all(r.poll() is None for r in ranks)
            time.sleep(0.1)
        time.sleep(0.5)
        found = [Rank(**r) for r in watchdog.dump(tmp_path, 0)]
        line = guilty(found)
        assert line.startswith(
            "rank 1 on node 0 has not entered barrier (collective 2); it is at <string>:11 in stuck; "
        )
        assert "; rank 0 waits for it in barrier since" in line
        folder = watchdog.write(found, line, tmp_path / "run")
        assert "barrier" in (folder / "rank-0.txt").read_text()
        sample = NodeMonitor(0, tmp_path / "run", tmp_path).sample()
        assert sample["ranks"]["0"][0] == 2 and sample["memory_fraction"] > 0 and sample["disk_free_bytes"] > 0
        ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        assert guilty([Rank(**r) for r in watchdog.dump(tmp_path, 0)]).startswith(
            "rank 1 on node 0 is stopped (state T)"
        )
    finally:
        for rank in ranks:
            rank.kill()


def test_the_rank_that_waits_least_is_the_straggler():
    nodes = {0: 0, 1: 0, 2: 1, 3: 1}
    assert straggler({0: 0.5, 1: 0.52, 2: 0.05, 3: 0.48}, nodes) == (
        "rank 2 on node 1 keeps the others waiting: in collectives they wait 50% of the time, it 5%"
    )
    assert straggler({0: 0.5, 1: 0.45, 2: 0.4, 3: 0.48}, nodes) == ""
    watch = Stragglers()
    first = [{"node": n, "unix_s": 100.0, "ranks": {str(n): [1, 0.0]}} for n in (0, 1)]
    later = [{"node": n, "unix_s": 140.0, "ranks": {str(n): [9, w]}} for n, w in ((0, 30.0), (1, 1.0))]
    assert [watch.look(s) for s in first + later] == ["", "", "", straggler({0: 0.75, 1: 0.025}, {0: 0, 1: 1})]


# --- a real job of two ranks ------------------------------------------------------------------------------------------


@pytest.fixture
def folder():
    """A short path: the names of Ray's sockets may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="dog-", dir="/tmp") as made:
        yield Path(made)


def run_with(fault: str, config: c.RunConfig, folder: Path, timeout_s: float = 400.0) -> tuple[int, str]:
    """The launcher with the faulty loop; exit code and all that was printed."""
    path = folder / "run.yaml"
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(folder / "run")))
    path.write_text(c.dump(config))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTRL_", "RAY_"))}
    env |= {"SPOTRL_TMP": str(folder), "SPOTRL_METADATA": "off", "FAULT": fault}
    command = [sys.executable, "-m", "trainer.node", "--config", str(path), "--",
               sys.executable, "-m", "tests.loops.faulty", "--config", str(path)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s)
    return done.returncode, done.stdout + done.stderr


def watched(config: c.RunConfig, steps: int = 8, **guards) -> c.RunConfig:
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, max_steps=steps),
        watch=c.Watch(floor_s=15.0),
        guards=c.Guards(**guards),
        checkpoint=dataclasses.replace(config.checkpoint, every_steps=100),
    )


@pytest.mark.slow
def test_a_deadlock_ends_the_job_and_names_the_rank(small_config, folder):
    code, text = run_with("deadlock", watched(small_config), folder)
    assert code == 34, text
    line = next(line for line in text.splitlines() if line.startswith("error: no progress"))
    assert "no progress in phase update of step 4" in line and "rank 1 on node 0 has not entered" in line
    assert "faulty.py" in line and "in stuck" in line  # rank 0 is not inside: ZeRO-3 gathers asynchronously
    (stacks,) = (folder / "run").glob("hang-*/rank-0.txt")
    assert "deepspeed" in stacks.read_text() or "policy.py" in stacks.read_text()


@pytest.mark.long
def test_a_killed_rank_ends_the_job_at_once(small_config, folder):
    code, text = run_with("killed", watched(small_config), folder)
    assert code == 34 and "error: a worker or node was lost" in text, text


@pytest.mark.long
def test_losses_that_are_not_finite_warn_and_then_end_the_run(small_config, folder):
    code, text = run_with("nan", watched(small_config), folder)
    assert code == 2, text
    assert "warning: step 4: loss/total not finite" in text
    assert "error: step 6: loss/total not finite" in text and "guards.end names this guard" in text


@pytest.mark.long
def test_a_straggler_is_named_while_the_job_goes_on(small_config, folder):
    code, text = run_with("straggler", watched(small_config, steps=14), folder)
    assert code == 0, text
    assert "warning: rank 1 on node 0 keeps the others waiting" in text
    assert len((folder / "run" / "nodes.jsonl").read_text().splitlines()) >= 4
