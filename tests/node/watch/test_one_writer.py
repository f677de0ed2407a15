"""One launcher, one driver, one attempt: what a SIGKILL leaves behind, a second start, a newer attempt
elsewhere.

The launcher, Ray, the session, the checkpoints and the store are real; the ranks pretend to train.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests import servers
from tests.loops.drill import configure
from tests.loops.jobs import ROOT, Job
from trainer.checkpoint.attempt import Attempts
from trainer.config import ConfigError, override
from trainer.node.watch.run_lock import RunLock
from trainer.storage.storage import Storage
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_FENCED, EXIT_GAVE_UP, EXIT_NODE_LOST, EXIT_PREEMPTED

FRONT = """import os, sys
from recipes.drivers.launching import _foreground
_foreground(sys.argv[1:], os.environ)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return configure(tmp_path_factory.mktemp("one"), 400, 2, standin=True)


@pytest.fixture
def start(base):
    """Starts a launcher (with front=True behind a front door); a short path, for the names of Ray's
    sockets."""
    jobs: list[Job] = []
    folders: list[str] = []

    def started(remote: str = "", folder: str = "", front: bool = False, **env: str) -> Job:
        folder = folder or tempfile.mkdtemp(prefix="one-", dir="/tmp")
        folders.append(folder)
        options = ["checkpoint.every_steps=4", "checkpoint.export_hf=never", "logging.push_every_s=1"]
        config = override(base, [f"run.dir={folder}/run", f"checkpoint.remote={remote}", *options])
        path = Path(folder) / "run.yaml"
        after = ("--", sys.executable, "-m", "tests.loops.standin", "--config", str(path))
        own = {"SPOTRL_NOTICE_S": "5", "SPOTRL_TMP": folder} | env
        before = (sys.executable, "-c", FRONT) if front else ()
        jobs.append(Job(config, Path(folder), own, "trainer.node", before=before, after=after))
        return jobs[-1].start()

    yield started
    for job in jobs:
        job.kill()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def running(job: Job) -> None:
    job.until(lambda: job.progress().get("step", 0) >= 2, 400)


def pid_of(job: Job, module: str) -> int:
    for pid in job.pids():
        if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", module.encode()]:
            return pid
    raise AssertionError(f"no process {module!r} of this job")


def gone_within(job: Job, seconds: float) -> float:
    begun = time.monotonic()
    while left := job.pids():
        assert time.monotonic() - begun < seconds, [
            Path(f"/proc/{p}/cmdline").read_bytes()[:120] for p in left
        ]
        time.sleep(0.1)
    return time.monotonic() - begun


def kill(job: Job, module: str = "") -> None:
    """SIGKILL to one of its processes, its first one if none is named: all the others go with it."""
    assert job.process
    before = len(job.pids())
    os.kill(pid_of(job, module) if module else job.process.pid, signal.SIGKILL)
    job.process.poll()
    seconds = gone_within(job, 15)
    print(f"{module or 'front door'}: {before} processes gone after {seconds:.1f} s")


@pytest.mark.slow
def test_a_killed_front_door_takes_all_the_others_with_it(start):
    job = start(front=True)
    running(job)
    kill(job)


@pytest.mark.slow
@pytest.mark.long
def test_a_second_start_is_refused_and_waits_for_one_that_is_ending(start):
    """The driver of the third is killed, too: all others go with it."""
    job = start()
    running(job)
    again = start(folder=str(job.path.parent))
    again.log = job.log
    assert again.wait(200) == EXIT_CONFIG
    assert f"is already held by process {job.process.pid} on" in job.tail()
    assert job.process.poll() is None, "the first one continues"
    os.kill(job.process.pid, signal.SIGTERM)
    third = start(folder=str(job.path.parent))
    third.until(lambda: "resumed from step" in third.tail(10**6).split("stopping:")[-1], 400)
    running(third)
    kill(third, "tests.loops.standin")
    assert third.wait(5) == EXIT_NODE_LOST
    assert "the job was killed by signal 9" in third.tail()


@pytest.mark.slow
@pytest.mark.long
def test_an_older_attempt_ends_when_a_newer_one_starts_elsewhere(start, tmp_path):
    """The launcher of the newer one is killed, too: all others go with it."""
    with servers.rclone(tmp_path / "store") as server:
        older = start("s3://bucket/runs", **server.env)
        running(older)
        newer = start("s3://bucket/runs", **server.env)
        assert older.wait(400) == EXIT_FENCED, older.tail()
        assert "has taken over" in older.tail()
        assert older.progress()["status"] == "fenced"
        gone_within(older, 15)
        running(newer)
        store = Storage("s3://bucket/runs/drill/checkpoints", env=server.env)
        attempts = Attempts(Storage("s3://bucket/runs/drill/attempts", env=server.env))
        assert attempts.alive().epoch == 2
        stream = Storage("s3://bucket/runs/drill/stream", env=server.env)

        def of(attempt: str, place: Storage) -> dict[str, int]:
            """The objects of an attempt, and their sizes."""
            return {key: size for key, size in place.list() if f"/{attempt}" in f"/{key}"}

        def names() -> set[str]:
            """What the newer attempt has in the store, by the parts of its keys."""
            return set("/".join([*of("2-", store), *of("2-", stream)]).split("/"))

        pushed = of("1-", stream)
        ended = time.monotonic()
        while not names() >= {"manifest.json", "metrics.jsonl", "launch.log", "nodes.jsonl"}:
            assert time.monotonic() - ended < 120, (names(), newer.tail())
            time.sleep(0.2)
        assert pushed and of("1-", stream) == pushed, "fenced: silent"
        kill(newer, "trainer.node")


@pytest.fixture
def launched(base):
    """Makes the launcher of a job that is Python code; a short path, for the names of Ray's sockets."""
    jobs: list[Job] = []
    with tempfile.TemporaryDirectory(prefix="one-", dir="/tmp") as folder:

        def made(code: str, remote: str = "", **env: str) -> Job:
            config = override(base, [f"run.dir={folder}/run", f"checkpoint.remote={remote}"])
            own = {"SPOTRL_TMP": folder, "SPOTRL_PEERS": "127.0.0.1", "SPOTRL_NODE_RANK": "0"}
            after = ("--", sys.executable, "-c", code, f"{folder}/run")
            jobs.append(Job(config, Path(folder), own | env, "trainer.node", after=after))
            return jobs[-1]

        yield made
        for job in jobs:
            job.kill()


@pytest.mark.long
def test_a_platform_that_restarts_for_ever_is_stopped_by_the_run(launched, tmp_path):
    """A job that fails without a new checkpoint: three restarts, then the code that ends it, then nothing
    more."""
    fails = "import os, sys; sys.exit(0 if os.environ['SPOTRL_LAUNCH'] == 'resumed' else 1)"
    with servers.rclone(tmp_path / "store") as server:
        job = launched(fails, "s3://bucket/runs", SPOTRL_LAUNCH="first", **server.env)
        assert [job.start().wait(400) for _ in range(4)] == [1, 1, 1, EXIT_GAVE_UP], job.tail()
        assert "gives up at step 0: 4 attempts failed with no new checkpoint" in job.tail()
        assert job.start().wait(200) == EXIT_GAVE_UP
        assert job.tail(10**6).count("starting Ray") == 4, "a run that is over starts nothing"
        job.env["SPOTRL_LAUNCH"] = "resumed"
        assert job.start().wait(400) == 0, job.tail()
        job.kill()


def test_a_lock_ends_with_its_process(tmp_path):
    code = "import time; from trainer.node.watch.run_lock import RunLock; "
    code += f"lock = RunLock({str(tmp_path)!r}, 'launcher'); lock.take()"
    command = [sys.executable, "-c", code + "; print('held', flush=True); time.sleep(60)"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"already held by process {process.pid}"):
        RunLock(tmp_path, "launcher").take()
    process.kill()
    process.wait()
    lock = RunLock(tmp_path, "launcher")
    lock.take()
    lock.close()


def test_a_run_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be written \(.*\): choose another run\.dir"):
        RunLock(tmp_path / "file" / "run", "launcher").take()


LOSES_A_RANK = """
import json, os, pathlib, sys, time
run = pathlib.Path(sys.argv[1])
attempt = os.environ["SPOTRL_ATTEMPT"]
print(f"attempt {attempt}", flush=True)
folder = run / f"checkpoints/step-0000000{attempt[0]}"
if attempt[0] < "3":  # two attempts get further, the third does not
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"manifest": {"attempt": attempt}}))
progress = {"status": "failed", "step": 10 * int(attempt[0]), "started_unix_s": time.time()}
(run / "progress.json").write_text(json.dumps(progress))
sys.exit(34)
"""


@pytest.mark.long
def test_a_lost_rank_gives_the_machine_back_only_without_a_new_checkpoint(launched):
    """The launcher, Ray and the record are real; the job only makes a checkpoint and says that a rank was
    lost."""
    job = launched(LOSES_A_RANK)
    assert job.start().wait(400) == EXIT_NODE_LOST, job.tail()
    said = job.tail(10**6)
    assert said.count("starting Ray") == 1 and said.count("the job starts again on them") == 2, said
    record = Attempts(Storage(f"{job.run_dir}/attempts"))
    for epoch in (1, 2, 3):
        assert f"attempt {record.read(epoch).name}" in said
    assert record.past()[-1].code == EXIT_NODE_LOST and record.final() is None


DIES_AT_STEP_5 = """
import json, os, pathlib, sys, time
run = pathlib.Path(sys.argv[1])
if os.environ["SPOTRL_ATTEMPT"][0] == "2":
    sys.exit(33)  # the second machine is taken away
(run / "progress.json").write_text(json.dumps({"status": "failed", "step": 5, "started_unix_s": time.time()}))
print("error: a rank or node was lost: rank 3 (process 7 on 10.0.0.1): out of memory?", flush=True)
sys.exit(34)
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_that_dies_twice_at_one_step_ends_the_run(launched):
    """On another machine it would die there again: the platform is told not to rent one."""
    job = launched(DIES_AT_STEP_5, SPOTRL_LAUNCH="first")
    record = Attempts(Storage(f"{job.run_dir}/attempts"))
    assert job.start().wait(400) == EXIT_NODE_LOST, job.tail()
    assert "one more death at step 5 ends the run" in record.past()[-1].left
    assert job.start().wait(400) == EXIT_PREEMPTED, job.tail()
    assert job.start().wait(400) == EXIT_GAVE_UP, job.tail()
    final = record.final()
    code, why = final.code, final.why
    assert code == EXIT_GAVE_UP and "died twice at step 5" in why and "rank 3 (process 7 on 10.0.0.1)" in why
