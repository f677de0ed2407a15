"""Which completions the loss takes, and what is counted of the others."""

import math

from tests.learning.one_rank import trace
from trainer.algorithm.credit import learnable_indices
from trainer.algorithm.traces import Outcome
from trainer.observe.step_stats import describe_completions

TRACES = [
    trace(0, [1, 2], [3, 4], logprobs=[-0.5, -1.0]),
    trace(0, [1, 2], [3, 4], logprobs=[-0.5, math.nan]),
    trace(1, [1, 2], [3, 4], logprobs=[-math.inf, -1.0], end="length"),
    trace(1, [1, 2], [3, 4], logprobs=[-0.5, -1.0], end="length"),
    trace(1, [1, 2], [3, 4]),
]


def test_logprobs_that_are_not_finite_never_reach_the_loss():
    """One of them would make the gradient of the whole update not a number."""
    assert learnable_indices(TRACES, mask_truncated=False) == [0, 3, 4]
    assert learnable_indices(TRACES, mask_truncated=True) == [0, 4]
    assert learnable_indices(TRACES[1:4], mask_truncated=True) == []


def test_they_are_counted_and_so_is_the_largest_reward():
    outcomes = [Outcome("correct", x, 0.0, x) for x in (1.0, -3e7, 0.0, 2.0, 0.5)]
    stats = describe_completions(TRACES, outcomes)
    assert stats["rollout/not_finite"] == 2 and stats["reward/largest"] == 3e7
