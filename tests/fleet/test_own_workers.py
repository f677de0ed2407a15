"""Rollout workers on the GPUs of the run's own nodes: `fleet.gpus_per_node`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from recipes.presets import resolve
from tests.fleet.jobs import KEY, assert_same_run
from tests.fleet.test_fleet_equals_colocated import run_config  # noqa: F401
from tests.loops.jobs import ROOT, Job
from trainer import config as c
from trainer.config import ConfigError, to_dict
from trainer.config.schema import SHARED_BY
from trainer.fleet.fleet_records import AboutRun
from trainer.fleet.worker import machine_options, worker_config
from trainer.node import topology
from trainer.node.launch import own_workers
from trainer.node.launch.head import HeadLauncher
from trainer.node.launch.launcher import LaunchEnded
from trainer.observe.history import read_history
from trainer.ranks.process import threads_of_a_gpu
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_NODE_LOST, EXIT_OK

SPLIT = ["fleet.workers=only", "fleet.gpus_per_node=2", "rollout.staleness=1", "rollout.tensor_parallel=1"]


def split(*more: str) -> c.RunConfig:
    """Six of eight GPUs learn, two sample."""
    placed = ["placement.workers_per_node=6", "checkpoint.remote=s3://bucket/runs", "run.id=mine"]
    return c.override(c.RunConfig(), [*SPLIT, *placed, *more])


def test_workers_have_the_gpus_behind_those_of_the_ranks():
    config = split()
    assert own_workers.worker_variables(config, {})["CUDA_VISIBLE_DEVICES"] == "6,7"
    given = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f,GPU-g,GPU-h"}
    assert own_workers.worker_variables(config, given)["CUDA_VISIBLE_DEVICES"] == "GPU-g,GPU-h"
    assert own_workers.worker_variables(split("placement.device=cpu"), {}) == {}


def test_ranks_and_workers_share_the_cores_of_their_node(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    config = split()
    assert threads_of_a_gpu(config) == 8, "six ranks and two workers"
    of_worker = c.override(config, ["placement.workers_per_node=1", "fleet.gpus_per_node=0"])
    assert threads_of_a_gpu(of_worker) == 64, "by hand it does not know of others"
    monkeypatch.setenv(SHARED_BY, own_workers.worker_variables(config, {})[SHARED_BY])
    assert threads_of_a_gpu(of_worker) == 8


def about(run):
    """What the head of a run says of it."""
    return AboutRun(attempt="1-abcdef", config=to_dict(run), code="", packages={}, data="", layout={})


def test_workers_with_other_engines_on_other_machines_may_sample_too():
    """The run's own split is nothing to them: here one GPU of each of its nodes samples."""
    run = split("fleet.gpus_per_node=1", "placement.workers_per_node=7")
    there = worker_config(about(run), "s3://bucket/runs/mine", "here", ["rollout.tensor_parallel=2"])
    c.validate(there)
    assert there.placement.workers_per_node == 2 and there.processes_per_node == 2


def test_workers_outlast_any_silence_of_a_trainer_that_starts():
    """A trainer that loads for longer than fleet.idle_s would come to no worker, again and again."""
    run = split("fleet.idle_s=900")
    own = machine_options(own_workers.own_worker_config(run))
    mine = worker_config(about(run), "s3://bucket/runs/mine", "here", own)
    assert mine.fleet.idle_s == own_workers.UNTIL_THE_LAUNCH_ENDS_S > 30 * 86_400


def test_workers_are_told_which_run_they_sample_for():
    told = own_workers.own_worker_config(split())
    assert told.fleet.run == "mine" and told.placement.workers_per_node == 2
    assert told.fleet.gpus_per_node == 0 and told.rollout.gpu_memory_utilization == 0.9


@pytest.mark.parametrize("code, ends", [(0, EXIT_OK), (33, EXIT_OK), (2, EXIT_CONFIG), (9, EXIT_NODE_LOST)])
def test_a_launch_ends_with_workers_that_failed_for_good(code, ends):
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"], text=True)
    process.wait()
    found, why = own_workers.worker_failure(process)
    assert found == ends and (f"ended with {code}" in why) == bool(ends)
    assert own_workers.worker_failure(None) == (EXIT_OK, "")


def test_workers_that_a_signal_ended_too_do_not_keep_the_trainer_from_saving(tmp_path):
    """Slurm sends its notice to every process of a job: a rank of an engine that still starts dies of it."""
    node = topology.read_node_environment({"SPOTRL_NODES": "1"})
    signals: Any = SimpleNamespace(number=None)
    head = HeadLauncher(split(f"run.dir={tmp_path}"), node, argparse.Namespace(), signals)
    head.sampling = subprocess.Popen([sys.executable, "-c", "raise SystemExit(34)"], text=True)
    head.sampling.wait()
    with pytest.raises(LaunchEnded, match="ended with 34"):
        head.check_own_workers()
    signals.number = signal.SIGTERM
    head.check_own_workers()


LAUNCH = """
import argparse, json, os, subprocess, sys, time
from types import SimpleNamespace
from trainer import config as c
from trainer.node import topology
from trainer.node.launch import own_workers
from trainer.node.launch.head import HeadLauncher
from trainer.node.launch.ray_node import Ports

says = "import json, os, time; print(json.dumps(dict(os.environ)), flush=True); time.sleep(60)"
own_workers.worker_command = lambda config, node: [sys.executable, "-c", says]
node = topology.read_node_environment({"SPOTRL_NODES": "1"})
signals = SimpleNamespace(number=None)
arguments = argparse.Namespace(command=[], config=sys.argv[1])
head = HeadLauncher(c.load(sys.argv[1]), node, arguments, signals)
port_taken = head.make_ray("127.0.0.1", Ports())
port_taken.close(keep_logs=False)
head.make_ray("127.0.0.1", Ports())
head.start_own_workers()
time.sleep(1)
head.check_own_workers()
head.close(0)
"""


def test_workers_start_with_ray_and_are_none_of_the_watchdogs_ranks(tmp_path):
    """Ray that does not start ends every process that its launcher has started, so workers come after it.
    They have ranks 0 and up too: with the ranks' beacons the watchdog would take one for the other."""
    path = tmp_path / "run.yaml"
    path.write_text(c.dump(split(f"run.dir={tmp_path}", f"model.path={tmp_path}")))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", LAUNCH, str(path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (said,) = done.stdout.splitlines()
    seen = json.loads(said)
    assert seen["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert not [name for name in seen if name in ("SPOTRL_BEACONS", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE")]


def test_a_recipe_has_ranks_on_the_other_gpus():
    recipe = resolve("grpo-qwen2.5-vl-7b-mathv60k", [*SPLIT, "fleet.gpus_per_node=4"])
    assert recipe.cluster.gpus_per_node == 8
    assert recipe.config.placement.workers_per_node == 4 and recipe.config.processes_per_node == 8


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["fleet.gpus_per_node=8"], "leave one at least that learns"),
        (["fleet.workers=off", "rollout.staleness=0"], "set fleet.workers to only"),
        (["fleet.gpus_per_node=3", "rollout.tensor_parallel=2"], "a multiple of 2"),
    ],
)
def test_what_cannot_be_split_is_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        resolve("grpo-qwen2.5-vl-7b-mathv60k", [*SPLIT, *options])


def test_a_loop_without_a_launcher_refuses_workers_that_nobody_starts(run_config, tmp_path):  # noqa: F811
    """It would wait for them for `fleet.wait_s`, and be started again by nobody."""
    fleet = ["fleet.workers=only", "fleet.gpus_per_node=1", f"checkpoint.remote={tmp_path / 'stored'}"]
    job = Job(run_config("split", *fleet), tmp_path / "split", {"SPOTRL_FLEET_KEY": KEY}).start()
    assert job.wait(120) == EXIT_CONFIG
    assert "`python -m trainer.node --config FILE`, or set fleet.gpus_per_node to 0" in job.tail()


def worker_of(job: Job) -> psutil.Process:
    """The worker's process, which its machine has started."""
    (found,) = [
        process
        for process in map(psutil.Process, job.pids())
        if "trainer.fleet.worker" in process.cmdline() and process.ppid() in job.pids()
    ]
    return found


@pytest.mark.long
def test_a_node_that_learns_and_samples_is_the_colocated_run(run_config, tmp_path):  # noqa: F811
    """One rank learns, one worker samples a step ahead. The worker is killed once, and comes back."""
    bucket = tmp_path / "stored"
    options = ["rollout.staleness=1"]
    fleet = ["fleet.workers=only", "fleet.gpus_per_node=1", "fleet.lost_s=6", f"checkpoint.remote={bucket}"]
    env = {"SPOTRL_FLEET_KEY": KEY, "SPOTRL_TMP": "/tmp"}
    job = Job(run_config("split", *options, *fleet), tmp_path / "split", env, "trainer.node")
    job.start()
    try:
        job.until(lambda: len(read_history(job.run_dir)) > 2, 400, poll_s=0.1)
        os.kill(worker_of(job).pid, signal.SIGKILL)
        assert job.wait(400) == 0, job.tail()
        assert not job.pids(), "nothing of the launch is left"
    finally:
        job.kill()
    log = Path(job.log).read_text()
    assert "a worker ended with -9; it is started again" in log
    assert "the run has reached its last step" in log or "ends:" in log

    colocated = Job(run_config("colocated", *options), tmp_path / "colocated").start()
    try:
        assert colocated.wait(400) == 0, colocated.tail()
    finally:
        colocated.kill()
    assert_same_run(colocated, job, but=("mismatch/",))
