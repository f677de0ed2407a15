"""A run with a teacher, killed after the teacher has judged a step: the restart asks it
nothing again, and metrics and weights are those of a run never killed."""

from __future__ import annotations

import hashlib
import re
import zipfile
from dataclasses import replace

import pytest

from examples.demo import tiny_model
from tests.loops.jobs import REWARD, Job
from trainer import config as c

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
KILLED = 2


def judged(job: Job, step: int) -> bytes:
    """What the log holds of a teacher's judgment of a step; empty where there is none yet."""
    path = job.run_dir / f"rollouts/step-{step:08d}.npz"
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read("teacher.npy")
    except (OSError, KeyError, zipfile.BadZipFile):
        return b""


def weights(job: Job) -> str:
    return hashlib.sha256((job.run_dir / "hf/model.safetensors").read_bytes()).hexdigest()


def test_a_killed_run_learns_the_same_from_its_teacher(small_config, tmp_path):
    teacher = tiny_model.build(tmp_path / "teacher", 1)
    (tmp_path / "reward.py").write_text(REWARD)
    base = replace(
        small_config,
        run=replace(small_config.run, max_steps=3),
        algorithm=replace(small_config.algorithm, teacher=str(teacher), kl_coef=0.0, samples_per_update=8),
        rewards=c.Rewards(function=f"{tmp_path}/reward.py:reward", workers=1),
        checkpoint=c.Checkpoint(every_steps=1, export_hf="end"),
    )
    calm, job = (
        Job(replace(base, run=replace(base.run, dir=str(tmp_path / name / "run"))), tmp_path / name)
        for name in ("calm", "killed")
    )
    assert calm.start().wait(500) == 0, calm.tail()

    job.start()
    saved = job.run_dir / "checkpoints/step-00000001/manifest.json"
    job.until(lambda: saved.exists() and judged(job, KILLED))
    job.kill()
    before = judged(job, KILLED)
    assert job.start().wait(500) == 0, job.tail()

    assert re.search("resumed from step [12]", job.log.read_text()) and judged(job, KILLED) == before
    assert job.metrics() == calm.metrics()
    assert weights(job) == weights(calm)
    assert all(line["teacher/gap_max"] > 0.1 for line in calm.metrics()[1:])
    assert job.pids() == calm.pids() == []
