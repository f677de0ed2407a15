"""What the head's launcher records of an end: whether a process died, and at which step."""

from __future__ import annotations

import argparse
import json
import signal
import time
from pathlib import Path

import pytest

from trainer.checkpoint.attempt import Attempts
from trainer.config import RunConfig, override
from trainer.config.run_folder import read_progress
from trainer.node import topology
from trainer.node.launch.head import HeadLauncher
from trainer.node.launch.job_watch import JobWatch
from trainer.node.launch.launcher import LaunchEnded
from trainer.node.launch.ray_node import JobEnd
from trainer.node.watch import preemption
from trainer.node.watch.attempt_holder import AttemptHolder
from trainer.system import exit_codes
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_GAVE_UP, EXIT_NODE_LOST, EXIT_RAY


class NoSignals:
    """No signal has come."""

    number = None
    expired = False


@pytest.fixture
def head(tmp_path):
    """The head of a node that a platform has started, whose attempt lies in a store."""
    config = RunConfig()
    places = [f"run.dir={tmp_path}/run", f"checkpoint.remote=file://{tmp_path}/bucket"]
    config = override(config, ["run.name=one", *places])
    node = topology.read_node_environment({"SPOTRL_NODES": "1"})
    launcher = HeadLauncher(config, node, argparse.Namespace(preflight=False, command=["job"]), NoSignals())
    launcher.holder = AttemptHolder(config, counts=True, trains=False)
    launcher.holder.take()
    yield launcher
    launcher.holder.lock.close()


def reach(head: HeadLauncher, step: int, started_unix_s: float) -> None:
    """The job writes how far it is."""
    progress = {"status": "running", "step": step, "started_unix_s": started_unix_s}
    (Path(head.config.run.dir) / "progress.json").write_text(json.dumps(progress))


@pytest.mark.parametrize(
    ("code", "died", "noticed", "step", "recorded"),
    [
        (EXIT_NODE_LOST, True, False, 5, 5),
        (EXIT_NODE_LOST, True, True, 5, None),  # its machine was about to be taken away
        (EXIT_NODE_LOST, False, False, 5, None),  # a machine is lost
        (EXIT_NODE_LOST, True, False, 0, 0),  # out of memory while the model is loaded
        (EXIT_RAY, False, False, 5, 5),
        (EXIT_RAY, False, False, 0, None),  # Ray did not start: the machine may be too busy
    ],
)
def test_only_a_process_that_died_while_machines_stayed_is_one(head, code, died, noticed, step, recorded):
    reach(head, step, time.time())
    head.died, head.others.noticed = died, noticed
    head.job_why = "a rank or node was lost: rank 3"
    assert head.settle(code) == code
    past = Attempts.of(head.config).past()[-1]
    assert (past.code, past.died_at_step, past.why) == (code, recorded, head.job_why)
    assert ("one more death" in past.left) == (recorded is not None)


def test_the_step_of_an_earlier_attempt_is_not_this_ones(head):
    reach(head, 40, head.began_unix_s - 60)
    head.died = True
    head.settle(EXIT_NODE_LOST)
    assert Attempts.of(head.config).past()[-1].died_at_step == 0


class Asleep:
    """A job that goes on until it is told to stop, and then leaves as a preempted one."""

    log = Path("none")

    def __init__(self, flag: Path):
        self.flag = flag

    def ended(self) -> JobEnd | None:
        return JobEnd("FAILED", exit_codes.EXIT_PREEMPTED, "") if self.flag.exists() else None


def watch_of(head: HeadLauncher, folder: Path) -> JobWatch:
    """The watch over a job, beside a Ray that stands still."""
    ray = argparse.Namespace(temp=folder, env={preemption.FLAG_VARIABLE: str(folder / "notice")})
    ray.stopped = lambda: ""
    head.ray = ray
    head.check_others = list
    return JobWatch(head, Asleep(folder / "notice"))


def test_a_run_whose_hours_are_over_saves_and_ends_for_good(head, tmp_path, monkeypatch):
    watch = watch_of(head, tmp_path)
    head.holder.until = time.monotonic() + 250.0
    with pytest.raises(LaunchEnded, match=r"have taken the 24 hours of budget.max_hours") as end:
        watch.run()
    assert end.value.code == EXIT_GAVE_UP
    monkeypatch.setenv(preemption.FLAG_VARIABLE, str(tmp_path / "notice"))
    notice = preemption.PreemptionNotice(signals=False)
    assert "budget.max_hours" in notice.poll()
    assert 240 < notice.remaining_s() <= 250, "the run's own limit: no provider's notice shortens it"
    notice.close()
    head.ray = None
    assert head.settle(end.value.code) == EXIT_GAVE_UP
    assert head.holder.attempt.record.final().code == EXIT_GAVE_UP


def test_a_job_that_outlasts_the_runs_hours_is_ended(head, tmp_path):
    watch = watch_of(head, tmp_path)
    head.holder.until = time.monotonic() - 1.0
    with pytest.raises(LaunchEnded) as end:
        watch.run()
    assert end.value.code == EXIT_GAVE_UP
    head.ray = None


def told(head: HeadLauncher) -> tuple[str, str]:
    """(the reason in the progress of the run, its log)."""
    folder = Path(head.config.run.dir)
    log = folder / "launch.log"
    return read_progress(folder)["why"], log.read_text() if log.exists() else ""


def test_the_sentence_on_the_screen_is_in_the_progress_the_record_and_the_log(head):
    reach(head, 5, time.time())
    head.died, head.job_why = True, "step 5 reward 0.904"
    head.why = "no progress in phase update of step 5: rank 1 on node 0 is stopped (state T)"
    head.settle(EXIT_NODE_LOST)
    assert told(head) == (head.why, f"error: {head.why}\n")
    assert Attempts.of(head.config).past()[-1].why == head.why


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (EXIT_CONFIG, "data.path has no split test", "data.path has no split test"),
        (EXIT_NODE_LOST, "", "exit code 34: another node, or a rank, vanished, did not come, or hangs"),
    ],
)
def test_what_the_job_said_or_what_the_code_means_is_the_reason(head, code, said, reason):
    reach(head, 5, time.time())
    head.job_why = said
    head.settle(code)
    assert told(head) == (reason, ""), "the job's own line is in the log already"


class EndedByItself(Asleep):
    """A job whose driver a guard has ended, while Ray has not said so yet."""

    def __init__(self, flag: Path):
        super().__init__(flag)
        self.asked = 0

    def signal(self, number: int) -> bool:
        return False

    def ended(self) -> JobEnd | None:
        self.asked += 1
        return JobEnd("FAILED", EXIT_CONFIG, "") if self.asked > 3 else None


@pytest.mark.parametrize("began", [True, False])
def test_ctrl_c_is_the_cause_only_of_a_job_that_had_not_begun(head, tmp_path, began):
    watch = watch_of(head, tmp_path)
    watch.job = EndedByItself(tmp_path / "notice")
    watch.job.pid = lambda: 4194303 if began else None
    head.signals.number, head.signals.code = signal.SIGINT, exit_codes.EXIT_INTERRUPTED
    if began:
        assert watch.run() == EXIT_CONFIG
    else:
        with pytest.raises(LaunchEnded) as end:
            watch.run()
        assert end.value.code == exit_codes.EXIT_INTERRUPTED
    head.signals.number, head.ray = None, None
