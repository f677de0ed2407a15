"""What a notice leaves time for: the step's end and a save, a save where the run stands, or only the exit
code.

The session, its checkpoints and its store are real; the ranks only pretend to train (tests/loops/standin.py).
"""

import os
import re
import signal
import time
from dataclasses import replace

import pytest

from tests import servers
from tests.loops.drill import configure
from tests.loops.jobs import Job
from trainer.system.exit_codes import EXIT_INTERRUPTED, EXIT_PREEMPTED

pytestmark = pytest.mark.slow

STEPS = 40


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return configure(tmp_path_factory.mktemp("standin"), STEPS, 2, standin=True)


@pytest.fixture
def start(base, tmp_path):
    """Starts a job that saves every `every` steps and whose phases each last a quarter of `step_s`."""
    jobs = []

    def started(notice_s: float, step_s: float = 0.4, every: int = 4, remote: str = "", **env: str) -> Job:
        checkpoint = replace(base.checkpoint, every_steps=every, remote=remote, export_hf="never")
        config = replace(base, run=replace(base.run, dir=str(tmp_path / "run")), checkpoint=checkpoint)
        own = {"SPOTRL_NOTICE_S": str(notice_s), "STANDIN_STEP_S": str(step_s)}
        jobs.append(Job(config, tmp_path, own | env, "tests.loops.standin"))
        return jobs[-1].start()

    yield started
    for job in jobs:
        job.kill()


def told_to_go(job: Job, number: int = signal.SIGTERM) -> tuple[int, float]:
    """Sends the notice; the exit code and the seconds until the process had left."""
    assert job.process
    begun = time.monotonic()
    os.kill(job.process.pid, number)
    return job.wait(60), time.monotonic() - begun


def resumes_from(job: Job) -> int:
    """The step that the next start resumes from."""
    begun = r"resumed from step \d+|starting from scratch"
    job.start().until(lambda: re.search(begun, job.tail(10**6).split("stopping:")[-1]))
    job.kill()
    return int((re.findall(r"resumed from step (\d+)", job.tail(10**6)) or ["0"])[-1])


@pytest.mark.long
def test_a_long_notice_lets_the_step_end_and_be_saved(start):
    job = start(60)
    job.until(lambda: job.in_phase("update", 6))
    code, _ = told_to_go(job)
    assert code == EXIT_PREEMPTED
    assert "finishing the step" in job.tail()
    last = job.metrics()[-1]["step"]
    assert last % 4, "not one of those that are saved anyway"
    assert f"resumes from step {last}" in job.tail()
    assert resumes_from(job) == last, "nothing is lost"


@pytest.mark.long
def test_before_anything_was_measured_it_is_tried(start):
    job = start(60, every=1000)
    job.until(lambda: job.in_phase("grade", 3))
    assert told_to_go(job)[0] == EXIT_PREEMPTED
    assert resumes_from(job) == job.metrics()[-1]["step"] >= 3


@pytest.mark.long
def test_too_short_for_the_step_but_not_for_a_save(start):
    """The notice comes while the answers of a step are sampled: the weights are still those of the step
    before."""
    job = start(4, step_s=6)
    job.until(lambda: job.in_phase("grade", 1), 60)
    assert job.progress()["step"] == 1
    job.until(lambda: job.in_phase("rollout", 2), 60)
    code, seconds = told_to_go(job)
    assert code == EXIT_PREEMPTED
    assert seconds < 4
    assert "finishing the step" not in job.tail()
    assert resumes_from(job) == 1, "only the step under way is lost"


@pytest.mark.long
def test_what_the_store_cannot_take_in_time_is_on_the_disk(start, tmp_path):
    with servers.rclone(tmp_path / "store") as server, servers.proxy(server.port) as relay:
        job = start(5, remote="s3://bucket/runs", every=2, **servers.s3_environment(relay.port))
        stored = tmp_path / "store/bucket/runs/drill/checkpoints"
        job.until(lambda: any(stored.glob("step-*/*/manifest.json")), 60)
        relay.bytes_per_s = 1e6  # per connection: a checkpoint of 25 MB takes more than the notice
        step = job.progress()["step"]
        job.until(lambda: job.in_phase("update", step + 1), 60)
        code, seconds = told_to_go(job)
        assert code == EXIT_PREEMPTED
        assert seconds < 5
        relay.bytes_per_s = 0
        last = job.metrics()[-1]["step"]
        assert not list((stored / f"step-{last:08d}").glob("*/manifest.json"))
        assert resumes_from(job) == last, "nothing is lost on this node"


def test_ctrl_c_saves_where_the_run_stands(start):
    job = start(60, step_s=1)
    job.until(lambda: job.in_phase("rollout", 3))
    code, seconds = told_to_go(job, signal.SIGINT)
    assert code == EXIT_INTERRUPTED
    assert "finishing the step" not in job.tail()
    assert resumes_from(job) == job.metrics()[-1]["step"] == 2
