"""Group normalisation against hand-computed numbers."""

import pytest
import torch

from trainer.algorithm.advantages import RunningNorm, group_norm


def test_by_hand():
    out = group_norm(torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 1.0]), torch.tensor([0, 0, 0, 0, 1, 1]), eps=0.0)
    s = (1 / 3) ** 0.5  # unbiased std of 1, 0, 0, 1
    assert out.values.tolist() == pytest.approx([0.5 / s, -0.5 / s, -0.5 / s, 0.5 / s, 2**-0.5, -(2**-0.5)])
    assert (out.zero_std_groups, out.groups) == (0, 2)


def test_groups_are_ids_not_positions():
    rewards, groups = torch.tensor([1.0, 5.0, 0.0, 7.0]), torch.tensor([9, 4, 9, 4])
    interleaved = group_norm(rewards, groups).values
    sorted_ = group_norm(rewards[[0, 2, 1, 3]], groups[[0, 2, 1, 3]]).values
    assert interleaved[[0, 2, 1, 3]].tolist() == sorted_.tolist()


def test_equal_rewards_and_singletons_teach_nothing_and_are_counted():
    out = group_norm(torch.tensor([0.7, 0.7, 0.7, 2.0]), torch.tensor([0, 0, 0, 1]))
    assert out.values.tolist() == [0, 0, 0, 0]
    assert (out.zero_std_groups, out.groups) == (2, 2)


def test_unequal_group_sizes():
    out = group_norm(torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1, 1]), eps=0.0)
    assert out.values[:2].tolist() == pytest.approx([2**-0.5, -(2**-0.5)])
    assert out.values[2:].sum().item() == pytest.approx(0.0, abs=1e-6)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="must both be"):
        group_norm(torch.zeros(3), torch.zeros(2))


def test_running_norm_is_that_of_everything_seen():
    norm, seen = RunningNorm(), torch.tensor([])
    g = torch.Generator().manual_seed(1)
    for _ in range(5):
        part = torch.randn(7, generator=g) * 3 + 2
        seen = torch.cat([seen, part])
        out = norm(part)
    assert norm.mean == pytest.approx(seen.mean().item(), rel=1e-6)
    assert (norm.m2 / (norm.count - 1)) ** 0.5 == pytest.approx(seen.std().item(), rel=1e-6)
    assert torch.allclose(out, (part - seen.mean()) / seen.std(), atol=1e-5)


def test_running_norm_goes_on_after_a_restart():
    a, b = RunningNorm(), RunningNorm()
    first, second = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.0, 3.0])
    a(first)
    b.__dict__.update(dict(a.__dict__))
    assert a(second).tolist() == b(second).tolist()
