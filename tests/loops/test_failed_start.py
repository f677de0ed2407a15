"""A start that fails says so in the run's folder, and leaves nothing open."""

from __future__ import annotations

import pytest

from tests.loops.jobs import Job
from trainer import config as c
from trainer.config.run_folder import read_progress
from trainer.node.watch.run_lock import RunLock
from trainer.run.session import Session
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


def test_a_stage_that_fails_undoes_those_before_it(small_config, monkeypatch):
    """The lock is free again, and the folder says how the start ended."""

    def measure(self, ranks):
        raise c.ConfigError("these rows are none")

    monkeypatch.setattr(Session, "_measure_rows", measure)
    with pytest.raises(c.ConfigError, match="these rows are none"):
        Session(small_config, lambda config, rows: 1)
    assert read_progress(small_config.run.dir)["status"] == "failed"
    lock = RunLock(small_config.run.dir, "driver")
    lock.take()
    lock.close()
