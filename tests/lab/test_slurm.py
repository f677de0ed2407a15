"""The generated batch script on a real Slurm of two nodes: to the end, and through a preemption with a requeue."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import checkout
import hosts
import pytest
import slurm

from recipes.commands import resolve
from recipes.targets import slurm as target

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(1500),
              pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing())]  # fmt: skip


@pytest.fixture
def cluster(tmp_path):
    with slurm.Slurm(tmp_path / "slurm") as made:
        yield made


def small(steps: int):
    """The demo on two nodes with one rank each, short enough for a test."""
    sizes = {"run.max_steps": steps, "rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4,
             "rollout.max_tokens": 16, "algorithm.micro_batch": 4, "evaluation.every_steps": 0,
             "checkpoint.every_steps": 1, "checkpoint.export_hf": "never"}  # fmt: skip
    recipe = resolve("demo", [*(f"{key}={value}" for key, value in sizes.items()), "cluster.nodes=2"])
    placement = dataclasses.replace(recipe.config.placement, workers_per_node=1)
    return dataclasses.replace(recipe, config=dataclasses.replace(recipe.config, placement=placement))


def submit(cluster, tmp_path, steps: int, data: Path, model: Path) -> tuple[str, Path, Path]:
    """(job id, the job's log, the run's directory)."""
    recipe = small(steps)
    repository = checkout.make(tmp_path / "repository")
    env = checkout.stock(tmp_path / "work", recipe, data, model)
    ((name, text),) = target.render(recipe).items()
    (repository / ".cache").mkdir()
    (repository / ".cache" / name).write_text(text)
    env |= {"RUN_ID": "lab", "SPOTRL_METADATA": "off"} | hosts.SHARED
    job = cluster.command("sbatch", "--parsable", f".cache/{name}", cwd=repository, **env).strip()
    return job, repository / f"slurm-demo-{job}.log", tmp_path / "work" / "runs" / "lab"


def steps_of(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_the_generated_script_runs_to_the_end(cluster, tmp_path, tiny_model, mixed_dataset):
    job, log, run = submit(cluster, tmp_path, 3, mixed_dataset, tiny_model)
    cluster.until(lambda: cluster.state(job)["JobState"] in ("COMPLETED", "FAILED"), 600, "end of the job")
    assert cluster.state(job)["JobState"] == "COMPLETED", log.read_text()
    assert steps_of(run) == [1, 2, 3]


def test_a_preempted_job_is_requeued_and_goes_on(cluster, tmp_path, tiny_model, mixed_dataset):
    job, log, run = submit(cluster, tmp_path, 40, mixed_dataset, tiny_model)
    cluster.until(lambda: len(steps_of(run)) >= 3, 600, "three steps")
    cluster.command("sbatch", "--parsable", "-p", "urgent", "-N2", "--wrap", "srun hostname", cwd=tmp_path)
    cluster.until(lambda: cluster.state(job)["Restarts"] == "1", 120, "requeue")
    done = max(steps_of(run))
    cluster.until(lambda: cluster.state(job)["JobState"] in ("COMPLETED", "FAILED"), 900, "end of the job")
    assert cluster.state(job)["JobState"] == "COMPLETED", log.read_text()
    assert steps_of(run) == list(range(1, 41))
    assert "resumed from step" in log.read_text() and done < 40
