"""A worker that waits for a trainer which starts for longer than `fleet.idle_s`: real processes."""

from __future__ import annotations

import pytest

from tests.fleet.jobs import FleetJob
from tests.loops.jobs import REWARD
from tests.waiting import until
from trainer.config import override
from trainer.observe.history import read_history
from trainer.storage.attempt_record import AttemptRecord
from trainer.storage.storage import Storage

pytestmark = [pytest.mark.slow, pytest.mark.long]
IDLE = ("--idle", "3")


@pytest.fixture
def launched(small_config, tmp_path):
    """(job, its folder in the bucket) of a run whose launcher has taken its attempt, and whose head will
    speak only once engine-less ranks have loaded the model."""
    (tmp_path / "reward.py").write_text(REWARD)
    options = [
        f"run.dir={tmp_path / 'run'}",
        "run.max_steps=2",
        f"rewards.function={tmp_path / 'reward.py'}:reward",
        "rewards.workers=1",
        "placement.workers_per_node=1",
    ]
    bucket = str(tmp_path / "stored")
    job = FleetJob(
        override(small_config, options),
        tmp_path / "job",
        bucket,
        {"SPOTRL_TMP": "/tmp"},
        module="tests.fleet.marking_launcher",
    )
    root = f"{bucket}/{job.config.run_id}"
    record = AttemptRecord(Storage(f"{root}/attempts"))
    job.start()
    try:
        job.until(lambda: record.read(1), 120, poll_s=0.05)
        yield job, root
    finally:
        job.kill()
        job.end_workers()


def test_it_waits_as_long_as_the_launcher_marks_the_attempt_as_alive(launched, tmp_path):
    job, root = launched
    worker = job.add_worker("w0", IDLE)
    assert job.wait(400) == 0, job.told()
    assert worker.wait() == 0, worker.said()
    begun = AttemptRecord(Storage(f"{root}/attempts")).read(1)
    (about,) = (tmp_path / "stored" / job.config.run_id / "fleet/about").iterdir()
    started_s = about.stat().st_mtime - begun.begun_unix_s
    print(f"the trainer started for {started_s:.1f} s, and its worker's patience is 3 s")
    assert started_s > 5
    assert read_history(job.run_dir)[-1]["fleet/units"] > 0


def test_it_ends_when_a_trainer_dies_before_its_head_has_spoken(launched):
    job, root = launched
    worker = job.add_worker("w0", IDLE)
    until(lambda: "waits for the trainer" in worker.said(), 60)
    job.kill()
    assert worker.wait(30) == 0, worker.said()
    assert f"no trainer of {root} within 3 s" in worker.said()
