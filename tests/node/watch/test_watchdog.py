"""The watchdog: judgement on made-up ranks, beacons of real ones, and faults in a real job."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from trainer import config as c
from trainer.checkpoint.attempt import Attempts
from trainer.node.watch import watchdog
from trainer.node.watch.watchdog import HangingRank, Watchdog, name_guilty_rank
from trainer.observe import beacon
from trainer.observe.node_monitor import NodeMonitor
from trainer.observe.phases import Phases
from trainer.storage.storage import Storage

ROOT = Path(__file__).parents[3]
STACKS = """Thread 0x1 (most recent call first):
  File "/x/ray/io.py", line 9 in poll

Current thread 0x2 (most recent call first):
  File "/x/trainer/engine/policy.py", line 123 in update
  File "/x/main.py", line 1 in main
"""


SAMPLE = {"node": 1, "unix_s": 1.0, "ranks": {}, "pieces": 0, "bytes_per_s": {}}


def at(
    rank: int, calls: int, inside: bool = True, name: str = "all_reduce", state: str = "S", stacks: str = ""
) -> HangingRank:
    return HangingRank(rank // 2, rank, calls, inside, 41.0, name, state, stacks)


LATE = "rank 2 on node 1 has not entered all_reduce (collective 7); it is at policy.py:123 in update;"
UNLIKE = "the ranks are in different collectives (rank 0 all_reduce, rank 1 barr"
ALL_IN = "all ranks are in all_reduce (collective 7): the network between them, or a GPU, hangs"
LATE_1 = "rank 1 on node 0 has not entered all_reduce (collective 7); rank 0 waits for it"
OUTSIDE = "all ranks are outside of collectives: rank 0 at policy.py"


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        (
            [at(0, 7), at(1, 7), at(2, 6, False, "all_gather", stacks=STACKS), at(3, 7)],
            f"{LATE} rank 0 waits for it in all_reduce since 41 s",
        ),
        ([at(0, 7), at(1, 7, False)], LATE_1),
        (
            [at(0, 7), at(1, 7, state="T")],
            "rank 1 on node 0 is stopped (state T); rank 0 waits for it in all_",
        ),
        ([at(0, 7), at(1, 7, state="")], "rank 1 on node 0 is gone"),
        ([at(0, 7), at(1, 7)], ALL_IN),
        ([at(0, 7), at(1, 7, name="barrier")], UNLIKE),
        ([at(0, 7, False, stacks=STACKS), at(1, 7, False)], OUTSIDE),
        ([], "no rank reported where it is"),
    ],
)
def test_the_rank_that_has_not_entered_is_the_guilty_one(ranks, line):
    assert name_guilty_rank(ranks).startswith(line)


def test_the_driver_is_named_where_no_rank_is_at_work():
    idle = (
        'Current thread 0x1 (most recent call first):\n  File "/x/ray/_private/worker.py", line 982 in'
        " main_loop\n"
    )
    ranks = [at(0, 7, False, stacks=idle), at(1, 7, False, stacks=idle)]
    line = "no rank is at work: the driver is at scorer.py:88 in score"
    assert name_guilty_rank(ranks, "scorer.py:88 in score") == line
    busy = [ranks[0], at(1, 7, False, stacks=STACKS)]
    assert name_guilty_rank(busy, "worker.py:1 in get").startswith("all ranks are outside of collectives")


def test_a_gpu_that_is_gone_or_stays_slow_is_told_of_once(tmp_path):
    dog = Watchdog(config(tmp_path))
    cool = {"gpu": 0, "slowdown": 4, "temperature_c": 60}
    hot = {"gpu": 1, "slowdown": 64 | 4, "temperature_c": 88}

    def sample(*gpus: dict) -> dict:
        return SAMPLE | {"gpus": list(gpus)}

    said = [dog.look(sample(cool, hot)) for _ in range(9)]
    assert [len(lines) for lines in said] == [0] * 5 + [1] + [0] * 3
    assert said[5] == ["warning: GPU 1 on node 1 is slowed down by heat or power, at 88 C"]
    gone = [dog.look(sample(hot)) for _ in range(2)]
    assert gone == [["warning: 1 of 2 GPUs on node 1 answer: look for an Xid in its kernel log"], []]


def config(tmp_path: Path, **watch) -> c.RunConfig:
    return c.RunConfig(run=c.Run(dir=str(tmp_path)), watch=c.Watch(**watch))


def test_a_phase_is_held_against_three_times_its_median(tmp_path):
    dog = Watchdog(config(tmp_path, floor_s=2.0, first_s=50.0, start_s=70.0))
    assert dog.limit_s("start") == 70.0 and dog.limit_s("update") == 50.0
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, update_s in enumerate([9.0, 1.0, 1.2, 1.1]):
            file.write(json.dumps({"step": step, "time/update_s": update_s, "time/sync_s": 0.1}) + "\n")
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


@pytest.mark.parametrize("set_by_s", [3600.0, -3600.0, 86400.0 * 365])
def test_a_clock_that_is_set_neither_makes_a_hang_nor_hides_one(tmp_path, monkeypatch, set_by_s):
    """The phase began an hour ago by the clock of now, or will begin in an hour."""
    monkeypatch.setattr(watchdog, "LOOK_S", 0.0)
    dog = Watchdog(config(tmp_path, first_s=0.4))
    phases = Phases(tmp_path)
    phases.begin(3, 9)
    with phases("update"), monkeypatch.context() as clock:
        assert dog.overdue() == ""
        real = time.time
        clock.setattr(time, "time", lambda: real() + set_by_s)
        assert dog.overdue() == "", "the phase is young"
        time.sleep(0.5)
        assert dog.overdue() == "no progress in phase update of step 3 for 1 s (limit 0)"


RANK = """
import os, sys, time
import torch.distributed as dist
from trainer.observe import beacon
rank = int(sys.argv[1])
beacon.start_beacon(rank)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/meet", rank=rank, world_size=2)
import torch
dist.all_reduce(torch.ones(1))
beacon.count_piece()
def stuck():
    time.sleep(600)
if rank == 1:
    stuck()
dist.barrier()
"""


def test_real_ranks_say_where_they_are(tmp_path, monkeypatch):
    """This process is the driver."""
    monkeypatch.setenv(beacon.FOLDER_VARIABLE, str(tmp_path))
    beacon.start_driver()
    env = os.environ | {beacon.FOLDER_VARIABLE: str(tmp_path), "PYTHONPATH": str(ROOT)}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(r), str(tmp_path)], env=env) for r in (0, 1)]
    try:
        deadline = time.monotonic() + 120
        while [b.calls for b in beacon.read_beacons(tmp_path)] != [2, 1]:
            assert time.monotonic() < deadline and all(r.poll() is None for r in ranks)
            time.sleep(0.1)
        time.sleep(0.5)
        found = [HangingRank(**r) for r in watchdog.dump_stacks(tmp_path, 0)]
        line = name_guilty_rank(found)
        assert line.startswith(
            "rank 1 on node 0 has not entered barrier (collective 2); it is at <string>:12 in stuck; "
        )
        assert "; rank 0 waits for it in barrier since" in line
        text = watchdog.report_hang(tmp_path, found, "why", tmp_path / "run")
        (folder,) = (tmp_path / "run").iterdir()
        assert text.startswith(f"why: {line}") and "barrier" in (folder / "rank-0.txt").read_text()
        assert "in test_real_ranks_say_where_they_are" in (folder / "driver.txt").read_text()
        sample = NodeMonitor(0, tmp_path / "run", tmp_path).sample()
        assert sample["ranks"]["0"][0] == sample["pieces"] == 2
        assert sample["memory_fraction"] > 0 and sample["disk_free_bytes"] > 0
        ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        assert name_guilty_rank([HangingRank(**r) for r in watchdog.dump_stacks(tmp_path, 0)]).startswith(
            "rank 1 on node 0 is stopped (state T)"
        )
    finally:
        faulthandler.unregister(beacon.SIGNAL)
        for rank in ranks:
            rank.kill()


def test_reading_and_writing_files_is_progress_where_that_is_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_S", 0.0)
    dog = Watchdog(config(tmp_path, first_s=0.2))
    phases = Phases(tmp_path)
    phases.begin(1, 9)
    busy = SAMPLE | {"bytes_per_s": {"files": 50_000_000}}
    idle = busy | {"bytes_per_s": {"files": 20_000}}
    with phases("export"):
        time.sleep(0.3)
        assert dog.look(busy) == [] and dog.overdue() == ""
        time.sleep(0.3)
        dog.look(idle)
        assert dog.overdue().startswith("no progress in phase export")
    with phases("update"):  # there it is none, but a finished pass is
        time.sleep(0.3)
        dog.look(busy | {"pieces": 4})
        assert dog.overdue() == ""
        time.sleep(0.3)
        dog.look(busy | {"pieces": 4})
        assert dog.overdue().startswith("no progress in phase update")


def test_what_rollout_workers_sample_is_progress_of_a_phase_that_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_S", 0.0)
    dog = Watchdog(config(tmp_path, first_s=0.4))
    phases = Phases(tmp_path)
    phases.begin(1, 9)
    with phases("rollout"):
        for _ in range(3):
            time.sleep(0.25)
            phases.sampled()
            assert dog.overdue() == ""
        time.sleep(0.5)
        assert dog.overdue().startswith("no progress in phase rollout")
    with phases("update"):
        time.sleep(0.5)
        phases.sampled()
        assert dog.overdue().startswith("no progress in phase update")


def test_nccl_s_flight_recorder_is_asked_for_and_lies_beside_the_stacks(tmp_path):
    """The two ends of torch's pipe: what ProcessGroupNCCL does on its own thread, a thread of ours does
    here."""
    os.mkfifo(tmp_path / "nccl_pipe_1.pipe")
    descriptor = os.open(tmp_path / "nccl_pipe_1.pipe", os.O_RDONLY | os.O_NONBLOCK)
    recorded = pickle.dumps({"entries": [{"collective_seq_id": 7, "state": "scheduled"}] * 500})

    def recorder() -> None:
        deadline = time.monotonic() + 10
        while not os.read(descriptor, 128) and time.monotonic() < deadline:
            time.sleep(0.05)
        (tmp_path / "nccl_trace_1").write_bytes(recorded)

    thread = threading.Thread(target=recorder)
    thread.start()
    traces = watchdog._traces(tmp_path)
    thread.join()
    os.close(descriptor)
    folder = watchdog.write_stacks(
        [at(0, 7), dataclasses.replace(at(1, 7), trace=traces[1])], "why", tmp_path / "run"
    )
    assert (folder / "nccl_trace_1").read_bytes() == recorded and len(traces[1]) < len(recorded) / 4
    assert sorted(p.name for p in folder.iterdir()) == ["nccl_trace_1", "rank-0.txt", "rank-1.txt"]


# --- a real job of two ranks ----------------------------------------------------------------------------


@pytest.fixture
def folder():
    """A short path: the names of Ray's sockets may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="dog-", dir="/tmp") as made:
        yield Path(made)


def run_with(
    fault: str, config: c.RunConfig, folder: Path, timeout_s: float = 400.0, **variables: str
) -> tuple[int, str]:
    """The launcher with the faulty loop; exit code and all that was printed."""
    path = folder / "run.yaml"
    path.write_text(c.dump(c.override(config, [f"run.dir={folder}/run"])))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTRL_", "RAY_"))}
    env |= {"SPOTRL_TMP": str(folder), "SPOTRL_METADATA": "off", "FAULT": fault} | variables
    job = [sys.executable, "-m", "tests.loops.faulty", "--config", str(path)]
    command = [sys.executable, "-m", "trainer.node", "--config", str(path), "--", *job]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s)
    return done.returncode, done.stdout + done.stderr


def watched(config: c.RunConfig, steps: int = 8, **guards) -> c.RunConfig:
    config = dataclasses.replace(config, watch=c.Watch(floor_s=15.0), guards=c.Guards(**guards))
    return c.override(config, [f"run.max_steps={steps}", "checkpoint.every_steps=100"])


@pytest.mark.slow
@pytest.mark.long
def test_a_deadlock_ends_the_job_and_names_the_rank(small_config, folder):
    code, text = run_with("deadlock", watched(small_config), folder)
    assert code == 34, text
    line = next(line for line in text.splitlines() if line.startswith("error: no progress"))
    assert "no progress in phase update of step 4" in line and "rank 1 on node 0 has not entered" in line
    assert "faulty.py" in line and "in stuck" in line  # rank 0 is not inside: ZeRO-3 gathers asynchronously
    (stacks,) = (folder / "run").glob("hang-*/rank-0.txt")
    assert "deepspeed" in stacks.read_text() or "policy.py" in stacks.read_text()


@pytest.mark.long
def test_a_killed_rank_is_named_and_started_again_on_the_same_machine(small_config, folder):
    """Where a platform would restart the job, and there is a new checkpoint: neither Ray nor the machine is
    given up. The step before it was profiled on both ranks."""
    options = ["logging.profile_step=2", "checkpoint.every_steps=1"]
    config = c.override(watched(small_config, steps=5), options)
    code, text = run_with("killed", config, folder, 600.0, SPOTRL_PEERS="127.0.0.1", SPOTRL_NODE_RANK="0")
    assert code == 0, text
    rank = r"error: a rank or node was lost: rank 1 \(process \d+ on [\d.]+\): "
    assert re.search(rank + "killed from outside, .*; it was asked for LearnerPart.update", text), text
    assert "profile of step 2: " in text
    traces = set()
    for path in (folder / "run/profile/step-00000002").iterdir():
        traces.add(tuple(path.name.split(".")[0].split("-")[1::2]))
    assert traces >= {(rank, call) for rank in "01" for call in ("sample", "update", "load")}
    assert text.count("starting Ray") == 1 and text.count("the job starts again on them") == 1
    assert "resumed from step 3" in text and "rollout log: steps 4 to 4 are replayed" in text
    record = Attempts(Storage(folder / "run/attempts"))
    assert [(past.epoch, past.code) for past in record.past()][-1] == (2, 0)


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
