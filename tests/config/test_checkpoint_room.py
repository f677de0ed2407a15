"""Disk is asked for the checkpoints that a run writes, not for those that a longer one would keep."""

from __future__ import annotations

import pytest

from trainer import config as c
from trainer.config.budget import CHECKPOINT_BYTES_PER_PARAMETER, checkpoints_bytes

ONE = 1000 * CHECKPOINT_BYTES_PER_PARAMETER


def asked(steps: int, every: int, held: int = 0) -> float:
    """Checkpoints of a run of a thousand parameters that the disk must have room for."""
    assignments = [f"run.max_steps={steps}", f"checkpoint.every_steps={every}", "checkpoint.keep_last=2"]
    config = c.override(c.RunConfig(), [*assignments, "checkpoint.keep_best=1", "placement.nodes=1"])
    return checkpoints_bytes(config, 1000, held * ONE) / ONE


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [(4, 100, 1), (4, 4, 1), (5, 4, 2), (8, 3, 3), (100, 5, 4), (0, 100, 4), (2, 0, 2), (100, 0, 4)],
)
def test_a_run_of_few_steps_writes_few(steps, every, expected):
    """Its last step is always saved; without a number of steps all are asked for that are kept."""
    assert asked(steps, every) == expected


def test_what_a_notice_left_lies_beside_them():
    assert asked(4, 100, held=1) == 2
    assert asked(100, 5, held=3) == 4
