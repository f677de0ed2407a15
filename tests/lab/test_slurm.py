"""Batch scripts on a real Slurm of two nodes: the committed one to the end; of two nodes through a
preemption."""

from __future__ import annotations

import time
from pathlib import Path

import checkout
import hosts
import pytest
import slurm
from checkout import steps_of

pytestmark = [*hosts.marks(slurm.missing()), pytest.mark.timeout(1500)]


@pytest.fixture
def cluster(tmp_path):
    with slurm.Slurm(tmp_path / "slurm") as made:
        yield made


def submit(
    cluster, tmp_path, steps: int, data: Path, model: Path, as_committed=False
) -> tuple[str, Path, Path]:
    """(job id, the job's log, the run's directory)."""
    script, env, run = checkout.batch(tmp_path, "slurm", steps, data, model, as_committed)
    repository = tmp_path / "repository"
    job = cluster.command("sbatch", "--parsable", str(script), cwd=repository, **env).strip()
    return job, repository / f"slurm-demo-{job}.log", run


def test_the_committed_script_runs_to_the_end(cluster, tmp_path, tiny_model, mixed_dataset):
    job, log, run = submit(cluster, tmp_path, 3, mixed_dataset, tiny_model, as_committed=True)
    cluster.until(
        lambda: cluster.state(job)["JobState"] in ("COMPLETED", "FAILED"), 600, "end of the job", log
    )
    assert cluster.state(job)["JobState"] == "COMPLETED", log.read_text()
    assert steps_of(run) == [0, 1, 2, 3], "0: what the model can before"


def test_a_preempted_job_is_requeued_and_goes_on(cluster, tmp_path, figure, tiny_model, mixed_dataset):
    job, log, run = submit(cluster, tmp_path, 60, mixed_dataset, tiny_model)
    cluster.until(lambda: len(steps_of(run)) >= 3, 600, "three steps", log)
    cluster.command(
        "sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "--wrap", "srun hostname", cwd=tmp_path
    )
    began = time.monotonic()
    cluster.until(lambda: cluster.state(job)["Restarts"] == "1", 60, "requeue", log)
    figure("until the job was requeued, after its preemption", time.monotonic() - began)
    done = max(steps_of(run))
    cluster.until(
        lambda: cluster.state(job)["JobState"] in ("COMPLETED", "FAILED"), 900, "end of the job", log
    )
    assert cluster.state(job)["JobState"] == "COMPLETED", log.read_text()
    assert steps_of(run) == list(range(1, 61))
    assert "resumed from step" in log.read_text() and done < 60
