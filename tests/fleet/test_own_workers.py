"""Rollout workers on the GPUs of the run's own nodes: `fleet.gpus_per_node`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from recipes.presets import resolve
from tests.fleet.jobs import KEY, assert_same_run
from tests.fleet.test_fleet_equals_colocated import run_config  # noqa: F401
from tests.loops.jobs import Job
from trainer import config as c
from trainer.config import ConfigError
from trainer.exit_codes import EXIT_CONFIG, EXIT_NODE_LOST, EXIT_OK
from trainer.node.launch import own_workers
from trainer.observe.history import read_history

SPLIT = ["fleet.workers=only", "fleet.gpus_per_node=2", "rollout.staleness=1", "rollout.tensor_parallel=1"]


def split(*more: str) -> c.RunConfig:
    """Six of eight GPUs learn, two sample."""
    placed = ["placement.workers_per_node=6", "checkpoint.remote=s3://bucket/runs", "run.id=mine"]
    return c.override(c.RunConfig(), [*SPLIT, *placed, *more])


def test_workers_have_the_gpus_behind_those_of_the_ranks():
    config = split()
    assert own_workers.gpus(config, {}) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    given = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f,GPU-g,GPU-h"}
    assert own_workers.gpus(config, given) == {"CUDA_VISIBLE_DEVICES": "GPU-g,GPU-h"}
    assert own_workers.gpus(split("placement.device=cpu"), {}) == {}


def test_workers_are_told_which_run_they_sample_for():
    told = own_workers.configured(split())
    assert told.fleet.run == "mine" and told.placement.workers_per_node == 2
    assert told.fleet.gpus_per_node == 0 and told.rollout.gpu_memory_utilization == 0.9


@pytest.mark.parametrize("code, ends", [(0, EXIT_OK), (33, EXIT_OK), (2, EXIT_CONFIG), (9, EXIT_NODE_LOST)])
def test_a_launch_ends_with_workers_that_failed_for_good(code, ends):
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"], text=True)
    process.wait()
    found, why = own_workers.failure(process)
    assert found == ends and (f"ended with {code}" in why) == bool(ends)
    assert own_workers.failure(None) == (EXIT_OK, "")


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


def worker_of(job: Job) -> psutil.Process:
    """The worker's process, which its machine has started."""
    (found,) = [
        process
        for process in map(psutil.Process, job.pids())
        if "trainer.fleet.worker" in process.cmdline() and process.ppid() in job.pids()
    ]
    return found


@pytest.mark.slow
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
