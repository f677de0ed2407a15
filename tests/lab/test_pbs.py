"""The generated PBS script on two hosts, started as PBS starts it: the head as its child, the other node over
real ssh.

No PBS server is packaged for Debian: `$PBS_NODEFILE` and the signals of `qdel` are what is played here.
"""

from __future__ import annotations

import time

import checkout
import hosts
import pytest
import sshd

pytestmark = hosts.marks(sshd.missing())
SSH_CONFIG = """\
IdentityFile {key}
StrictHostKeyChecking accept-new
"""


@pytest.fixture
def lab():
    with hosts.Lab(["h1", "h2"], private=("/run",)) as made:
        key = sshd.serve(made, made.hosts.values())
        (sshd.home(made.hosts["h1"]) / ".ssh").mkdir()
        (sshd.home(made.hosts["h1"]) / ".ssh" / "config").write_text(SSH_CONFIG.format(key=key))
        yield made


def submit(lab, tmp_path, steps, data, model):
    """(the script's process, its log, the run's directory)."""
    script, env, run = checkout.batch(tmp_path, "pbs", steps, data, model)
    nodes = tmp_path / "nodes"
    nodes.write_text("h1\nh1\nh2\n")
    env |= {"PBS_NODEFILE": str(nodes), "PBS_JOBID": "7.h1", "PBS_O_WORKDIR": str(tmp_path / "repository")}
    log = tmp_path / "job.log"
    return lab.hosts["h1"].start(["setsid", "--wait", "bash", str(script)], log, env), log, run


def test_the_generated_script_runs_to_the_end(lab, tmp_path, tiny_model, mixed_dataset):
    job, log, run = submit(lab, tmp_path, 3, mixed_dataset, tiny_model)
    assert job.wait(400) == 0, log.read_text()
    assert checkout.steps_of(run) == [1, 2, 3]
    assert "[node 1] joined the head h1" in log.read_text()
    assert sshd.left(lab, "h1", "h2") == []


def test_qdel_lets_the_run_save_and_ends_both_hosts(lab, tmp_path, figure, tiny_model, mixed_dataset):
    job, log, run = submit(lab, tmp_path, 40, mixed_dataset, tiny_model)
    hosts.until(
        lambda: len(checkout.steps_of(run)) >= 2 or job.poll() is not None, 400, "two steps", log.read_text
    )
    assert job.poll() is None, log.read_text()
    began = time.monotonic()
    # as PBS: to the job's session
    lab.hosts["h1"].run("sh", "-c", "kill -s TERM -- -$(pgrep -of '^bash .*demo.pbs')")
    assert job.wait(60) == 33, log.read_text()
    hosts.until(lambda: not sshd.left(lab, "h1", "h2"), 60, "end on both hosts")
    figure("until the run was saved and both hosts ended, after qdel", time.monotonic() - began)
    saved = checkout.committed(run)
    assert saved and saved[-1] == checkout.steps_of(run)[-1], (saved, log.read_text())
