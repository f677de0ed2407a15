"""Every estimator against hand-computed numbers."""

import math

import pytest
import torch

from tests.learning.one_rank import trace
from trainer.algorithm.advantages import (
    RewardParts,
    RunningNorm,
    estimate_advantages,
    flat_groups,
    gdpo,
    group_norm,
    leave_one_out,
    returns_to_go,
    whiten,
)
from trainer.algorithm.credit import learnable_indices
from trainer.algorithm.traces import Outcome
from trainer.config import Algorithm
from trainer.observe.step_stats import describe_completions

REWARDS, GROUPS = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 1.0]), torch.tensor([0, 0, 0, 0, 1, 1])


def test_gdpo_lets_a_reward_of_small_spread_count_as_much_as_a_large_one():
    parts = torch.tensor([[1.0, 0.0], [0.0, 0.01], [1.0, 0.01], [0.0, 0.0]], dtype=torch.float64)
    groups = torch.zeros(4, dtype=torch.long)
    both = gdpo(parts, torch.ones(2), groups, 0.0)
    # 2 z, 0, 0, -2 z, normalized
    assert both.tolist() == pytest.approx([0, 0, 1.5**0.5, -(1.5**0.5)], abs=1e-12)
    tilted = gdpo(parts, torch.tensor([3.0, 1.0]), groups, 0.0)
    assert tilted[0] == pytest.approx(-float(tilted[1])) and float(tilted[2] / tilted[0]) == pytest.approx(2)


def test_returns_to_go_by_hand():
    """Two sequences of 3 and 1 tokens; each token's KL is subtracted from its own return and the earlier
    ones'."""
    lengths, kl = torch.tensor([3, 1]), torch.tensor([0.1, 0.2, 0.3, 0.5])
    assert returns_to_go(torch.tensor([1.0, 2.0]), lengths).tolist() == [1, 1, 1, 2]
    assert returns_to_go(torch.tensor([1.0, 2.0]), lengths, 1.0, kl).tolist() == pytest.approx(
        [0.4, 0.5, 0.7, 1.5]
    )
    discounted = returns_to_go(torch.tensor([1.0, 2.0]), lengths, 0.5, kl).tolist()
    assert discounted == pytest.approx([-0.1 + 0.5 * (-0.2 + 0.5 * 0.7), -0.2 + 0.5 * 0.7, 0.7, 1.5])


def test_reinforce_pp_is_whitened_over_tokens_not_sequences():
    """Rewards 1 and 0 on 3 tokens and 1: mean 3/4, variance 3/16 over the tokens."""
    rewards = RewardParts(("accuracy",), torch.tensor([[1.0], [0.0]], dtype=torch.float64), torch.ones(1))
    lengths, groups = torch.tensor([3, 1]), torch.tensor([0, 0])
    out = estimate_advantages(Algorithm(advantage="reinforce_pp"), rewards, rewards.total, groups, lengths)
    third = 3**-0.5
    assert out.tokens == [pytest.approx([third] * 3), pytest.approx([-3 * third])]
    assert out.values.tolist() == pytest.approx([third, -3 * third])
    paired = estimate_advantages(
        Algorithm(advantage="reinforce_pp_baseline"), rewards, rewards.total, groups, lengths
    )
    assert paired.tokens is not None and out.tokens is not None  # 0.5 and -0.5: the same once whitened
    assert paired.tokens[0] == pytest.approx(out.tokens[0])
    assert whiten(torch.tensor([2.0, 2.0])).tolist() == [0, 0]


def test_the_kl_of_a_sequence_is_subtracted_from_its_reward():
    rewards = RewardParts(("accuracy",), torch.tensor([[1.0], [0.0]], dtype=torch.float64), torch.ones(1))
    kl, lengths = torch.tensor([0.1, 0.2, 0.3, 0.0]), torch.tensor([3, 1])
    out = estimate_advantages(
        Algorithm(advantage="rloo"), rewards, rewards.total, torch.tensor([0, 0]), lengths, kl
    )
    assert out.values.tolist() == pytest.approx([0.4, -0.4])


@pytest.mark.parametrize("kind", ["group_norm", "group_mean", "batch_norm", "rloo", "gdpo"])
def test_flat_groups_get_exactly_zero_and_order_does_not_matter(kind):
    g = torch.Generator().manual_seed(0)
    parts = torch.rand(24, 2, generator=g, dtype=torch.float64)
    groups = 4 + 3 * (torch.arange(24) % 6)  # ids, no positions
    parts[groups == 13] = torch.tensor([0.7, 0.1], dtype=torch.float64)
    rewards = RewardParts(("a", "b"), parts, torch.tensor([1.0, 0.5], dtype=torch.float64))

    def ask(r, at):
        return estimate_advantages(
            Algorithm(advantage=kind), r, r.total, at, torch.ones(len(at), dtype=torch.long)
        )

    out, order = ask(rewards, groups), torch.randperm(24, generator=g)
    again = ask(RewardParts(rewards.names, parts[order], rewards.weights), groups[order])
    assert torch.allclose(out.values[order], again.values, atol=1e-6)
    if kind != "gdpo":  # the mean over the batch moves all
        assert out.values[groups == 13].tolist() == [0] * 4


def test_equal_rewards_and_singletons_teach_nothing_and_are_counted():
    rewards, groups = torch.tensor([0.7, 0.7, 0.7, 2.0]), torch.tensor([0, 0, 0, 1])
    assert group_norm(rewards, groups).tolist() == leave_one_out(rewards, groups).tolist() == [0, 0, 0, 0]
    assert flat_groups(rewards, groups).tolist() == [True, True]


def test_unequal_group_sizes():
    out = group_norm(torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1, 1]), eps=0.0)
    assert out[:2].tolist() == pytest.approx([2**-0.5, -(2**-0.5)])
    assert out[2:].sum().item() == pytest.approx(0.0, abs=1e-6)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="must both be"):
        group_norm(torch.zeros(3), torch.zeros(2))


def test_running_norm_is_that_of_everything_seen():
    norm, seen = RunningNorm(), torch.tensor([])
    g = torch.Generator().manual_seed(1)
    for _ in range(5):
        part = torch.randn(7, generator=g) * 3 + 2
        seen = torch.cat([seen, part])
        out = norm.normalize(part)
    assert norm.mean == pytest.approx(seen.mean().item(), rel=1e-6)
    assert (norm.m2 / (norm.count - 1)) ** 0.5 == pytest.approx(seen.std().item(), rel=1e-6)
    assert torch.allclose(out, (part - seen.mean()) / seen.std(), atol=1e-5)


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
