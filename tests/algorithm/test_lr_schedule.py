"""The learning rate by hand."""

import math

import pytest

from trainer import config as c
from trainer.algorithm.lr_schedule import learning_rate
from trainer.config import Optimizer


def rates(total, **options):
    return [
        learning_rate(Optimizer(learning_rate=1.0, **options), update, total) for update in range(total + 2)
    ]


def test_warm_up_by_steps_and_by_ratio():
    assert rates(10, warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(10, warmup_ratio=0.31) == rates(10, warmup_steps=4), "rounded up"
    assert rates(10) == [1.0] * 12


def test_decay_ends_on_its_floor_and_stays_there():
    linear = rates(10, warmup_steps=2, schedule="linear", floor=0.1)
    assert (
        linear[2] == 1.0
        and linear[6] == pytest.approx(0.1 + 0.9 * 0.5)
        and linear[10:] == pytest.approx([0.1] * 2)
    )
    cosine = rates(8, schedule="cosine", floor=0.2)
    assert cosine[2] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert cosine[8:] == pytest.approx([0.2] * 2)
    assert rates(8, schedule="cosine")[8] == pytest.approx(0.0)


def test_the_ratio_ties_a_resume_to_the_length_of_the_run():
    assert "run.max_steps" not in c.resume_view(c.RunConfig())
    assert "run.max_steps" in c.resume_view(c.RunConfig(optimizer=Optimizer(warmup_ratio=0.1)))
