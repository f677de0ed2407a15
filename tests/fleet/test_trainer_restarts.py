"""The trainer goes and comes back while its workers stay: the run is the colocated one, bit for bit."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace

import pytest

from tests.fleet.jobs import FleetJob, assert_same_run, wait_for, without_workers
from tests.loops.jobs import REWARD
from trainer.config import RunConfig, override
from trainer.system.exit_codes import EXIT_FENCED

pytestmark = pytest.mark.slow
STEPS = 6


@pytest.fixture
def run_config(small_config, tmp_path):
    """A run that saves every second step."""
    (tmp_path / "reward.py").write_text(REWARD)

    def configured(folder: str, ahead: int) -> RunConfig:
        return override(
            small_config,
            [
                f"run.dir={tmp_path / folder / 'run'}",
                f"run.max_steps={STEPS}",
                f"rollout.staleness={ahead}",
                f"rewards.function={tmp_path / 'reward.py'}:reward",
                "rewards.workers=1",
                "evaluation.every_steps=4",
                "evaluation.max_samples=6",
                "checkpoint.every_steps=2",
                "logging.keep_rollouts=true",
                "placement.workers_per_node=1",
            ],
        )

    return configured


def far_enough(job: FleetJob, bucket) -> bool:
    """In step 4 or later, with a checkpoint in the bucket. Folders may vanish while they are listed."""
    committed = any("manifest.json" in files for _, _, files in os.walk(bucket))
    return job.progress().get("step", 0) >= 4 and committed


@pytest.mark.long
@pytest.mark.parametrize("ahead", [2, 0])
def test_killed_and_started_again(run_config, tmp_path, ahead):
    """What was sampled ahead with weights that are gone is replayed; workers follow the new attempt."""
    bucket = tmp_path / "stored"
    job = FleetJob(run_config("fleet", ahead), tmp_path / "fleet", str(bucket))
    try:
        for name in ("w0", "w1"):
            job.add_worker(name)
        job.start()
        job.until(lambda: far_enough(job, bucket), 600)
        job.kill()
        job.start()
        job.finish()
    finally:
        job.kill()
        job.end_workers()
    said = job.log.read_text()
    assert re.search(r"^resumed from step [24]$", said, re.MULTILINE), said[-4000:]
    assert_same_run(without_workers(run_config("alone", ahead), tmp_path / "alone"), job, but=("mismatch/",))
    for worker in job.workers.values():
        assert "follows attempt 2-" in worker.said() and "has reached its last step" in worker.said()
    left = {path.parent.name for path in bucket.rglob("*.patch")}
    assert all(name.startswith("2-") for name in left), "patches of the attempt that was killed stay"


@pytest.mark.long
def test_killed_before_the_first_checkpoint(run_config, tmp_path):
    """The new attempt begins with the pretrained model, which the workers have left behind by then."""
    bucket = tmp_path / "stored"
    job = FleetJob(run_config("fleet", 0), tmp_path / "fleet", str(bucket))
    try:
        for name in ("w0", "w1"):
            job.add_worker(name)
        job.start()
        job.until(lambda: job.in_phase("wait", 2) and list(bucket.rglob("*.patch")), 600)
        job.kill()
        assert not list(bucket.rglob("manifest.json"))
        job.start()
        job.finish()
    finally:
        job.kill()
        job.end_workers()
    assert job.log.read_text().count("starting from scratch") == 2
    assert_same_run(without_workers(run_config("alone", 0), tmp_path / "alone"), job)
    for worker in job.workers.values():
        assert "follows attempt 2-" in worker.said() and "has reached its last step" in worker.said()


@pytest.mark.long
def test_two_heads(run_config, tmp_path):
    """The first trainer's driver is stopped, as by a machine that hangs, and goes on beside the second."""
    bucket = tmp_path / "stored"
    config = run_config("fleet", 0)
    old = FleetJob(config, tmp_path / "fleet", str(bucket))
    elsewhere = replace(config, run=replace(config.run, dir=str(tmp_path / "elsewhere/run")))
    new = FleetJob(elsewhere, tmp_path / "elsewhere", str(bucket))
    try:
        for name in ("w0", "w1"):
            old.add_worker(name)
        old.start()
        old.until(lambda: far_enough(old, bucket) and old.in_phase("wait", 4), 600)
        assert old.process
        os.kill(old.process.pid, signal.SIGSTOP)
        new.start()
        new.until(lambda: new.in_phase("wait", 3), 600)
        os.kill(old.process.pid, signal.SIGCONT)
        assert old.wait(300) == EXIT_FENCED, old.tail()
        assert new.wait(900) == 0, new.tail()
        wait_for(lambda: all(worker.process.poll() == 0 for worker in old.workers.values()))
    finally:
        old.kill()
        new.kill()
        old.end_workers()
    assert "attempt 1-" in old.tail() and "has taken over" in old.tail()
    said = new.log.read_text()
    resumed = re.search(r"^resumed from step (\d)$", said, re.MULTILINE)
    assert resumed and int(resumed[1]) >= 2, "the second trainer began anew"
    # what the first one had sampled since is read from the bucket, and not written to the second's disk
    replayed = re.search(r"^rollout log: steps \d to (\d) are replayed", said, re.MULTILINE)
    logged = int(replayed[1]) if replayed else int(resumed[1])
    assert logged < STEPS
    alone = without_workers(run_config("alone", 0), tmp_path / "alone")
    assert_same_run(alone, new, since=logged + 1)
