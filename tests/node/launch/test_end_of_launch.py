"""What the head's launcher records of an end: whether a process died, and at which step."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.checkpoint.attempt import Attempts
from trainer.config import RunConfig
from trainer.exit_codes import EXIT_NODE_LOST, EXIT_RAY
from trainer.node import topology
from trainer.node.launch.head import HeadLauncher
from trainer.node.watch.attempt_holder import AttemptHolder


class NoSignals:
    """No signal has come."""

    number = None


@pytest.fixture
def head(tmp_path):
    """The head of a node that a platform has started, whose attempt lies in a store."""
    config = RunConfig()
    config = replace(
        config,
        run=replace(config.run, name="one", dir=str(tmp_path / "run")),
        checkpoint=replace(config.checkpoint, remote=f"file://{tmp_path}/bucket"),
    )
    node = topology.read({"SPOTRL_NODES": "1"})
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
    head.said = "a rank or node was lost: rank 3"
    assert head.settle(code) == code
    past = Attempts.of(head.config).past()[-1]
    assert (past.code, past.died_at_step, past.why) == (code, recorded, head.said)
    assert ("one more death" in past.left) == (recorded is not None)


def test_the_step_of_an_earlier_attempt_is_not_this_ones(head):
    reach(head, 40, head.began_unix_s - 60)
    head.died = True
    head.settle(EXIT_NODE_LOST)
    assert Attempts.of(head.config).past()[-1].died_at_step == 0
