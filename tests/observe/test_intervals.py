"""Intervals of scores cover 95%, by simulation of whole evaluations."""

import numpy as np
import pytest

from trainer.observe.scores import confidence_interval

PROBLEMS = (5, 10, 20, 50, 200)
DIFFICULTIES = ((0.5, 0.0), (0.1, 0.0), (0.9, 0.0), (1.0, 1.0), (0.3, 0.3), (0.1, 0.1))
DIFFICULTIES += ((0.2, 1.8), (1.8, 0.2), (5.0, 5.0), (8.0, 2.0))
"""Beta's parameters of the problems' own chances; (p, 0): all alike."""
EVALUATIONS = 1000


def coverage(problems, samples, difficulty, draw):
    """Share of evaluations whose interval holds the true mean, and their mean width."""
    a, b = difficulty
    shape = (EVALUATIONS, problems)
    chances = draw.beta(a, b, shape) if b else np.full(shape, a)
    truth = a / (a + b) if b else a
    found = draw.binomial(samples, chances) / samples
    intervals = np.array([confidence_interval(row.tolist()) for row in found])
    held = (intervals[:, 0] <= truth) & (truth <= intervals[:, 1])
    return held.mean(), (intervals[:, 1] - intervals[:, 0]).mean()


@pytest.mark.parametrize("samples", [2, 4, 16])
def test_of_several_samples(samples):
    draw = np.random.default_rng(samples)
    found = {(n, d): coverage(n, samples, d, draw) for n in PROBLEMS for d in DIFFICULTIES}
    error = 3 * (0.95 * 0.05 / EVALUATIONS) ** 0.5  # of the simulation
    assert min(held for held, _ in found.values()) > 0.95 - error, min(
        found.items(), key=lambda one: one[1][0]
    )
    # and they are no wider than intervals of one sample would be
    alike = found[200, (0.5, 0.0)][1]
    assert alike < 2 * 1.96 * 0.5 / 200**0.5


def test_problems_that_agree_leave_an_interval():
    low, high = confidence_interval([0.5] * 4)
    assert low < 0.3 and high > 0.7
    low, high = confidence_interval([0.5] * 400)
    assert 0.48 < low < 0.5 < high < 0.52
