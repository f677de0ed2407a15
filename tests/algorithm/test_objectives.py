"""Surrogates, corrections, shaping and refilling by hand, and invariance of each to how a batch is cut."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer import config as c
from trainer.algorithm.credit import choose_groups, prompts_to_refill, reward_step
from trainer.algorithm.losses import grpo_loss, mismatch_sums, rollout_weights, token_weights
from trainer.algorithm.reward_shaping import (
    LoopState,
    next_kl_coef,
    overlong_penalty,
)
from trainer.algorithm.traces import Outcome, completed_trace
from trainer.config import RunConfig

LENGTHS = torch.tensor([2, 1])
RATIOS = torch.tensor([2.0, 0.5, 3.0])
OLD = torch.tensor([-1.0, -2.0, -3.0])


def loss_of(kind, advantages, low=0.2, high=0.2, dual=0.0, ratios=RATIOS, weights=None, lengths=LENGTHS):
    logprobs = (OLD + ratios.log()).requires_grad_()
    weights = torch.full((3,), 1 / 3) if weights is None else weights
    loss = grpo_loss(
        logprobs,
        OLD,
        torch.tensor(advantages),
        weights,
        clip_low=low,
        clip_high=high,
        kind=kind,
        dual_clip=dual,
        lengths=lengths,
    )
    loss.total.backward()
    assert logprobs.grad is not None
    return float(loss.total), logprobs.grad.tolist(), loss


def test_dual_clip_by_hand():
    """min(r A, clip(r) A) at r = 3 and A = -1 is -3; with dual clip 2.5 it is -2.5, and its gradient 0."""
    total, grad, loss = loss_of("ppo", [-1.0, 1.0, -1.0], dual=2.5)
    assert total == pytest.approx((2 - 0.5 + 2.5) / 3)
    assert grad == pytest.approx([2 / 3, -0.5 / 3, 0]) and float(loss.clip_fraction) == pytest.approx(1 / 3)
    assert loss_of("ppo", [-1.0, 1.0, -1.0])[0] == pytest.approx((2 - 0.5 + 3) / 3)


def test_gmpo_clips_logarithms_then_takes_the_geometric_mean():
    """log 2 is cut to 0.4 for a good token; log 0.5 is not, since it falls; so sqrt(e^0.4 / 2) for the
    first."""
    weights = token_weights(LENGTHS, "sequences", 3, 2)
    total, grad, _ = loss_of("gmpo", [1.0, 1.0, -1.0], 0.4, 0.4, weights=weights)
    first = math.sqrt(math.exp(0.4) / 2)
    assert total == pytest.approx((-first + 3) / 2)
    assert grad == pytest.approx([0, -first / 4, 1.5], abs=1e-7)


def test_correction_by_hand():
    gap = torch.tensor([math.log(4.0), math.log(0.5), math.log(0.1)])

    def find(kind, level, low=0.0, high=2.0):
        return [x.tolist() for x in rollout_weights(gap, LENGTHS, kind, level, low, high)]

    assert find("mask", "token", low=0.2) == [pytest.approx([0, 0.5, 0]), [True, False, True]]
    assert find("mask", "sequence", high=1.9)[0] == pytest.approx([0, 0, 0.1])  # 4 x 0.5 = 2
    assert find("truncate", "geometric")[0] == pytest.approx([2**0.5, 2**0.5, 0.1])
    assert all(
        math.isfinite(x) for x in rollout_weights(gap * 100, LENGTHS, "truncate", "sequence", 0.0, 1e9)[0]
    )


def test_correction_multiplies_the_surrogate_and_leaves_the_kl():
    lp = torch.tensor([-1.0, -2.0])
    ref = torch.tensor([-1.5, -2.0])
    w = torch.full((2,), 0.5)
    loss = grpo_loss(
        lp,
        lp,
        torch.ones(2),
        w,
        clip_low=0.2,
        clip_high=0.2,
        ref_logprobs=ref,
        kl_coef=1.0,
        kl_estimator="k2",
        correction=torch.tensor([2.0, 0.0]),
    )
    assert float(loss.policy) == pytest.approx(-1.0) and float(loss.total) == pytest.approx(-1.0 + 0.125 / 2)


def test_mismatch_is_the_kl_both_ways_and_the_effective_sample_size():
    """Over a whole distribution the estimates are the divergences themselves."""
    policy, engine = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.5, 0.25, 0.25])
    out = mismatch_sums(policy.log() - engine.log(), engine)

    def kl(p, q):
        return float((p * (p / q).log()).sum())

    assert float(out["mismatch/kl"]) == pytest.approx(kl(engine, policy), rel=1e-5)
    assert float(out["mismatch/kl_reverse"]) == pytest.approx(kl(policy, engine), rel=1e-5)
    assert float(out["mismatch/ratio_mean"]) == pytest.approx(1)
    assert float(out["ratio_square"]) == pytest.approx(0.2**2 / 0.5 + 0.3**2 / 0.25 + 0.5**2 / 0.25)
    assert all(
        math.isfinite(float(x)) for x in mismatch_sums(torch.tensor([200.0, -200.0]), torch.ones(2)).values()
    )


@pytest.mark.parametrize(
    ("kind", "denominator", "level"),
    product(
        ["ppo", "gspo", "cispo", "gmpo"],
        ["tokens", "sequences", "constant"],
        ["token", "sequence", "geometric"],
    ),
)
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut(kind, denominator, level):
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 2, 7, 1, 4, 3])
    n, ends = int(lengths.sum()), [0, *lengths.cumsum(0).tolist()]
    start = torch.randn(n, generator=g) - 2
    old, ref, rollout = (start + 0.3 * torch.randn(n, generator=g) for _ in range(3))
    advantages = torch.repeat_interleave(torch.randn(6, generator=g), lengths)

    def run(cuts):
        logprobs, sums = start.clone().requires_grad_(), torch.zeros(5)
        for a, b in cuts:
            part, own = slice(ends[a], ends[b]), lengths[a:b]
            correction, _ = rollout_weights(old[part] - rollout[part], own, "truncate", level, 0.0, 1.3)
            loss = grpo_loss(
                logprobs[part],
                old[part],
                advantages[part],
                token_weights(own, denominator, n, 6, 9),
                clip_low=0.2,
                clip_high=0.3,
                ref_logprobs=ref[part],
                kl_coef=0.1,
                kind=kind,
                lengths=own,
                correction=correction,
                shares=token_weights(own, "tokens", n, 6),
            )
            loss.total.backward()
            sums += torch.stack([loss.total.detach(), loss.policy, loss.kl, loss.clip_fraction, loss.ratio])
        return sums, logprobs.grad

    whole, whole_grad = run([(0, 6)])
    for cuts in ([(0, 2), (2, 4), (4, 6)], [(i, i + 1) for i in range(6)], [(3, 6), (3, 3), (0, 3)]):
        sums, grad = run(cuts)
        assert torch.allclose(sums, whole, atol=1e-6) and torch.allclose(grad, whole_grad, atol=1e-7)


def test_constant_denominator_weighs_every_token_of_every_step_the_same():
    assert token_weights(torch.tensor([1, 3]), "constant", 4, 2, 10).tolist() == pytest.approx([1 / 20] * 4)
    assert token_weights(torch.tensor([], dtype=torch.long), "tokens", 0, 0).tolist() == []


def test_overlong_punishment_by_hand():
    """DAPO's own: 20,480 tokens of which the last 4,096 are punished."""
    lengths = torch.tensor([100, 16_384, 18_432, 20_480])
    assert overlong_penalty(lengths, 20_480, 0.2).tolist() == pytest.approx([0, 0, -0.5, -1])


def test_the_penalty_joins_the_grader_s_rewards_with_its_weight():
    config = c.RunConfig(
        rollout=c.Rollout(max_tokens=10), algorithm=c.Algorithm(overlong_buffer=0.5, overlong_penalty=2.0)
    )
    traces = []
    for i, ids in enumerate(([1] * 10, [1, 2])):
        traces.append(completed_trace([1], ids, group=0, row=0, index=i))
    credit = reward_step(config, traces, [Outcome("correct", 1.0, 0.0, 1.0)] * 2)
    assert credit.rewards.names == ("reward/accuracy", "reward/format", "reward/overlong")
    assert credit.rewards.parts.tolist() == [[1, 0, -1], [1, 0, 0]]
    assert credit.rewards.total.tolist() == pytest.approx([-1, 1])
    assert credit.flat == [True], "groups are told apart by the grader alone"
    assert credit.describe(config, [0, 1])["reward/overlong"] == -0.5


def test_the_kl_coefficient_is_steered_by_at_most_a_fifth_per_horizon():
    assert next_kl_coef(0.1, 0.06, 0.05, 1000, 100) == pytest.approx(0.1 * 1.02)
    assert next_kl_coef(0.1, 5.0, 0.05, 1000, 1000) == pytest.approx(0.12)
    assert next_kl_coef(0.1, -1.0, 0.05, 1000, 1000) == pytest.approx(0.08)
    assert next_kl_coef(0.1, float("nan"), 0.05, 1000, 1000) == 0.1  # of updates that were skipped


def test_a_checkpoint_without_the_newer_fields_goes_on_where_it_stood():
    loop_state = LoopState.resume({"count": 3.0, "mean": 0.5, "m2": 0.1}, RunConfig(), 5)
    assert (loop_state.prompts, loop_state.kl_coef) == (5 * 64, 1e-3)
    assert (loop_state.count, loop_state.mean, loop_state.m2) == (3.0, 0.5, 0.1)
    assert LoopState.resume(loop_state.state() | {"gone": 1.0}, RunConfig(), 6) == loop_state


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 40))
def test_chosen_groups_are_useful_first_in_order_and_never_more_than_asked(flat, size):
    kept, useful = choose_groups(flat, size), len(flat) - sum(flat)
    assert kept == sorted(set(kept)) and len(kept) == min(size, len(flat))
    assert sum(not flat[g] for g in kept) == min(useful, size)
    need = prompts_to_refill(flat, size)
    assert (need == 0) == (useful >= size) and need <= size
    assert need == 0 or need >= min(size, size - useful)


def test_shortfall_expects_the_share_seen_so_far():
    # 2 lack, and half of what was asked taught something
    assert prompts_to_refill([False, False, True, True], 4) == 4
    assert prompts_to_refill([True, True, True, False], 3) == 3  # 2 x 4, but no more than a step's prompts
    assert prompts_to_refill([True] * 4, 4) == 4 and prompts_to_refill([False] * 4, 4) == 0
