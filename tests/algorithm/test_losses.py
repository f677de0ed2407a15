"""Hand-computed values of losses."""

import math

import pytest
import torch

from trainer.algorithm.losses import discount_advantages, grpo_loss, kl_divergence

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def test_kl_estimators_by_hand():
    p, q = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
    assert kl_divergence(p, q, "k1").tolist() == [0.5, 0.0]
    assert kl_divergence(p, q, "k2").tolist() == [0.125, 0.0]
    assert kl_divergence(p, q, "k3").tolist() == pytest.approx([math.exp(-0.5) - 1 + 0.5, 0.0])


def test_k3_is_never_negative_and_stays_finite():
    d = torch.linspace(-200, 200, 4001)
    values = kl_divergence(d, torch.zeros_like(d), "k3")
    assert bool((values >= 0).all()) and bool(values.isfinite().all())


@pytest.mark.parametrize("below", [-40.0, -2.0, 0.5, 2.0, 3.0, 12.0, 19.9])
def test_k3_is_the_papers_and_pulls_every_token_back(below):
    """DeepSeekMath, eq. 4: q/p - log(q/p) - 1. Where the value is clamped the gradient would be 0."""
    logprobs = torch.tensor([-below], dtype=torch.float64, requires_grad=True)
    value = kl_divergence(logprobs, torch.zeros(1, dtype=torch.float64), "k3")
    value.sum().backward()
    assert value.item() == pytest.approx(math.exp(below) - below - 1, rel=1e-9)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(1 - math.exp(below), rel=1e-9)


@pytest.mark.parametrize("below", [20.5, 90.0, 1000.0])
def test_beyond_twenty_nats_k3_is_a_line_with_the_slope_that_it_has_there(below):
    logprobs = torch.tensor([-below], requires_grad=True)
    value = kl_divergence(logprobs, torch.zeros(1), "k3")
    value.sum().backward()
    slope = math.exp(20) - 1
    assert value.item() == pytest.approx(math.exp(20) - 21 + (below - 20) * slope, rel=1e-5)
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(-slope, rel=1e-5)


def test_a_wild_log_ratio_is_clamped_and_never_makes_a_nan():
    """At 100 nats the ratio is infinite in fp32, and infinity times advantage 0 not a number."""
    logprobs = torch.tensor([0.0, 0.0, -100.0], requires_grad=True)
    old = torch.tensor([-100.0, -100.0, 0.0])
    loss = grpo_loss(logprobs, old, torch.tensor([0.0, 1.0, -1.0]), torch.full((3,), 1 / 3), **CLIP)
    loss.total.backward()
    assert bool(loss.total.isfinite()) and logprobs.grad is not None and not logprobs.grad.any()
    assert float(loss.clamped) == pytest.approx(1)
    moderate = grpo_loss(torch.tensor([-1.0]), torch.tensor([-9.0]), torch.ones(1), torch.ones(1), **CLIP)
    assert float(moderate.ratio) == pytest.approx(math.exp(8), rel=1e-5) and float(moderate.clamped) == 0


def test_k2_gradient_is_that_of_the_kl():
    """Over a whole distribution: d/dtheta sum p log(p/q) equals the expected gradient of k2 with the samples
    fixed."""
    theta, q = torch.tensor([0.3, -0.2, 0.5], requires_grad=True), torch.tensor([0.2, 0.5, 0.3])
    p = theta.softmax(0)
    exact = torch.autograd.grad((p * (p.log() - q.log())).sum(), theta)[0]
    estimate = (p.detach() * kl_divergence(theta.log_softmax(0), q.log(), "k2")).sum()
    assert torch.allclose(torch.autograd.grad(estimate, theta)[0], exact, atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.0, 2.0, -2.0, 0.0),
        (1.5, 2.0, -2.4, 1.0),  # min(3, 1.2 * 2)
        (0.5, 2.0, -1.0, 0.0),  # min(1, 0.8 * 2): a falling good token is not clipped
        (0.5, -2.0, 1.6, 1.0),  # min(-1, 0.8 * -2)
        (1.5, -2.0, 3.0, 0.0),
    ],
)
def test_surrogate_by_hand(ratio, advantage, expected, clipped):
    old = torch.tensor([-1.0])
    loss = grpo_loss(old + math.log(ratio), old, torch.tensor([advantage]), torch.ones(1), **CLIP)
    assert float(loss.policy) == pytest.approx(expected, rel=1e-5)
    assert float(loss.clip_fraction) == clipped


def test_discount_weighs_earlier_tokens_less():
    spread = discount_advantages(torch.tensor([2.0, -1.0]), torch.tensor([3, 2]), 0.5)
    assert spread.tolist() == [0.5, 1.0, 2.0, -0.5, -1.0]
    even = discount_advantages(torch.tensor([2.0, -1.0]), torch.tensor([3, 2]), 1.0)
    assert even.tolist() == [2, 2, 2, -1, -1]
