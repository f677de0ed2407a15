"""Pass rates that rollout workers sample: no policy and no engine beside them, and the file is the same."""

from __future__ import annotations

import json

import pytest

from tests.fleet.jobs import FleetJob
from tests.loops.jobs import Job
from trainer.config import RunConfig, override
from trainer.config.run_folder import read_roster

LOOP = "trainer.loops.pass_rate"
ROWS = 22


def configured(small_config: RunConfig, folder, run_id: str) -> RunConfig:
    """Six blocks, the last of them short, of completions that are drawn at temperature 1."""
    return override(
        small_config,
        [
            f"run.dir={folder / 'run'}",
            f"run.id={run_id}",
            "evaluation.pass_rate_samples=3",
            f"data.max_samples={ROWS}",
            "lora.rank=1",
            "rewards.workers=1",
            "placement.workers_per_node=1",
            "model.dtype=bf16",
        ],
    )


@pytest.mark.slow
@pytest.mark.long
def test_they_are_those_of_a_run_without_workers(small_config, tmp_path):
    """Two workers; the loop is killed and started again after some blocks."""
    job = FleetJob(
        configured(small_config, tmp_path / "fleet", "fleet"),
        tmp_path / "fleet",
        str(tmp_path / "stored"),
        module=LOOP,
    )
    rates = job.run_dir / "pass_rates.jsonl"
    try:
        job.add_worker("w0")
        job.add_worker("w1")
        job.start()
        job.until(lambda: rates.exists() and rates.read_text().count("\n") >= 4, 400)
        job.kill()
        job.start()
        job.finish()
    finally:
        job.kill()
        job.end_workers()
    assert "weight sync: engine and policy" not in job.log.read_text(), "a policy was loaded"
    assert sum(row["completions"] for row in read_roster(job.run_dir)) > 0

    alone = Job(
        configured(small_config, tmp_path / "alone", "alone"), tmp_path / "alone", module=LOOP
    ).start()
    try:
        assert alone.wait(400) == 0, alone.tail()
    finally:
        alone.kill()
    ours = (alone.run_dir / "pass_rates.jsonl").read_text()
    assert rates.read_text() == ours and len(ours.splitlines()) == ROWS
    assert any(json.loads(line)["tokens"] for line in ours.splitlines())
