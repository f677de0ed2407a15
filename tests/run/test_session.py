"""A session is made in stages: one that fails undoes those before it, the last one first.

Grader, rollout log, checkpoints, lock and rows are real; ranks, learner and sampler pretend.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.loops.standin import StandinLearner, StandinRanks, StandinSampler
from trainer import config as c
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.rollout_log import RolloutLog
from trainer.config.run_folder import read_progress
from trainer.node.watch.run_lock import RunLock
from trainer.rewards.scorer import Scorer
from trainer.run import session
from trainer.run.measured_rows import Rows
from trainer.run.session import Session

OPENED = ["RunLock", "Scorer", "RolloutLog", "Checkpoints"]
"""What is open once the models load, in the order in which it was opened."""


class StandinFleet:
    """A `FleetSampler` without workers."""

    overlaps_learning = True

    def __init__(self, *_: Any) -> None:
        pass

    def leave(self) -> None:
        pass


@pytest.fixture
def closed(monkeypatch) -> list[str]:
    """The stand-ins are in place; names of what is closed, in order."""
    names: list[str] = []

    def note(owner: type, method: str) -> None:
        really = getattr(owner, method)

        def noted(self: Any) -> None:
            names.append(owner.__name__)
            really(self)

        monkeypatch.setattr(owner, method, noted)

    for owner in (RunLock, Scorer, RolloutLog, Checkpoints):
        note(owner, "close")
    note(StandinFleet, "leave")
    monkeypatch.setattr(session, "RayRanks", StandinRanks)
    monkeypatch.setattr(session, "DistributedLearner", StandinLearner)
    monkeypatch.setattr(session, "Colocated", StandinSampler)
    monkeypatch.setattr(session, "FleetSampler", StandinFleet)
    return names


def make(config: c.RunConfig) -> Session:
    return Session(config, lambda config, rows: 1)


def breaks(error: BaseException):
    def broken(*_: Any, **__: Any) -> Any:
        raise error

    return broken


FAILURES = [
    pytest.param(session, "Scorer", OPENED[:1], id="no grader"),
    pytest.param(session, "try_at_start", OPENED[:2], id="a reward that does not run"),
    pytest.param(session, "of_this_job", OPENED[:2], id="no right to write"),
    pytest.param(session, "RolloutLog", OPENED[:2], id="no rollout log"),
    pytest.param(session, "Checkpoints", OPENED[:3], id="no checkpoints"),
    pytest.param(session, "RayRanks", OPENED, id="ranks that cannot be placed"),
    pytest.param(Rows, "usable", OPENED, id="rows that are none"),
    pytest.param(Checkpoints, "find", OPENED, id="a checkpoint of another run"),
    pytest.param(StandinLearner, "start", OPENED, id="a policy that cannot be loaded"),
    pytest.param(StandinSampler, "start", OPENED, id="engines that cannot be built"),
    pytest.param(session, "StepLog", OPENED, id="the last stage"),
]


@pytest.mark.parametrize(("owner", "name", "opened"), FAILURES)
def test_a_stage_that_fails_undoes_those_before_it(small_config, closed, monkeypatch, owner, name, opened):
    monkeypatch.setattr(owner, name, breaks(c.ConfigError("this stage fails")))
    with pytest.raises(c.ConfigError, match="this stage fails"):
        make(small_config)
    assert closed == opened[::-1]
    assert read_progress(small_config.run.dir)["status"] == "failed"
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("rollout-log", "commit"))]
    monkeypatch.undo()
    lock = RunLock(small_config.run.dir, "driver")
    lock.take()
    lock.close()


def test_a_fleet_is_left_before_what_it_writes_to_is_closed(small_config, closed, monkeypatch):
    monkeypatch.setenv("SPOTRL_FLEET_KEY", "0" * 32)
    monkeypatch.setattr(session, "StepLog", breaks(c.ConfigError("this stage fails")))
    with pytest.raises(c.ConfigError, match="this stage fails"):
        make(c.override(small_config, ["fleet.workers=only"]))
    assert closed == ["StandinFleet", *OPENED[::-1]]


def test_rows_that_are_not_there_claim_nothing(small_config, closed, tmp_path):
    with pytest.raises(c.ConfigError):
        make(c.override(small_config, [f"data.path={tmp_path}/nothing"]))
    assert closed == []
    assert not list(tmp_path.glob("**/progress.json"))


def test_who_interrupts_a_start_is_told_apart_from_what_fails(small_config, closed, monkeypatch):
    monkeypatch.setattr(StandinLearner, "start", breaks(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        make(small_config)
    assert closed == OPENED[::-1]
    assert read_progress(small_config.run.dir)["status"] == "interrupted"


@pytest.mark.parametrize("error", [None, RuntimeError("in the loop")])
def test_a_session_that_was_made_closes_all_of_it_once(small_config, closed, error):
    made = make(small_config)
    assert closed == []
    if error is None:
        with made:
            pass
    else:
        with pytest.raises(RuntimeError, match="in the loop"), made:
            raise error
    assert closed == OPENED[::-1]
    made.saving.notice.close()
    assert read_progress(small_config.run.dir)["status"] == "running", "how it ends is the process's to say"


def test_an_error_after_alarms_names_the_checkpoint_from_before_them(small_config, closed, capsys):
    made = make(small_config)
    with pytest.raises(RuntimeError), made:
        made.checkpoints.retention.trouble = 7
        raise RuntimeError("in the loop")
    made.saving.notice.close()
    printed = capsys.readouterr().out
    assert "trouble since step 7; no checkpoint is from before it: start a new run" in printed


def test_a_run_that_is_resumed_under_other_rules_of_grading_says_so(
    small_config, closed, monkeypatch, capsys
):
    config = c.override(small_config, ["checkpoint.every_steps=1", "run.max_steps=3"])
    printed = []
    for rules in (2, 2, 3):
        monkeypatch.setattr("trainer.run.session.RULES", rules)
        monkeypatch.setattr("trainer.run.saving.RULES", rules)
        made = make(config)
        with made:
            step = made.resume().step + 1
            made.save(step, config.run.max_steps, step, {})
            made.finish(step, step, {})
        made.saving.notice.close()
        printed.append([line for line in capsys.readouterr().out.splitlines() if "rules" in line])
    assert printed == [[], [], ["answers are graded by rules 3 from here on: until step 2 it was by 2"]]
