"""A start that fails says so in the run's folder, and leaves nothing open."""

from __future__ import annotations

import pytest

from tests.loops.jobs import Job
from trainer import config as c
from trainer.config.run_folder import read_progress
from trainer.system.exit_codes import EXIT_CONFIG


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_that_cannot_be_placed(small_config, tmp_path):
    """The cluster is too small: the folder says `failed`, not `running` for ever."""
    options = [
        "placement.workers_per_node=2",
        "placement.threads_per_worker=400",
        "placement.start_timeout_s=3",
    ]
    job = Job(
        c.override(small_config, options), tmp_path / "job", {"RAY_OVERRIDE_RESOURCES": '{"CPU": 2}'}
    ).start()
    assert job.wait(200) == EXIT_CONFIG, job.tail()
    assert "the Ray cluster cannot hold 2 ranks" in job.tail()
    assert read_progress(small_config.run.dir)["status"] == "failed"
