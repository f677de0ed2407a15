"""The schedule: everything once, equal passes, the budget kept, and as good as its simulation said."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import config as c
from trainer.algorithm.lr_schedule import learning_rate
from trainer.algorithm.scheduling import (
    KEYS,
    PassCost,
    SampleLength,
    busy_fraction,
    pass_times,
    schedule_passes,
)
from trainer.config import Optimizer


def draws(seed, groups, size, median, sigma, cap):
    """Prompts of 80 to 760 tokens; completions lognormal, correlated within a group."""
    rng = random.Random(seed)
    prompts = [rng.randint(80, 760) for _ in range(groups)]
    out = []
    for g, prompt in enumerate(prompts):
        center = rng.lognormvariate(median, sigma * 0.7)
        for _ in range(size):
            n = max(8, min(cap, int(center * rng.lognormvariate(0, sigma * 0.7))))
            out.append(SampleLength(g, prompt, n))
    return out


def tokens(lengths, members):
    prompts = {lengths[i].prompt: lengths[i].prompt_tokens for i in members}
    return sum(prompts.values()) + sum(lengths[i].completion_tokens for i in members)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 900)), min_size=1, max_size=60),
    st.integers(1, 9),
    st.integers(1, 3_000),
)
def test_every_sample_once_in_equal_numbers_of_passes_within_the_budget(samples, world, budget):
    lengths = [SampleLength(g, 100 * g + 7, n) for g, n in samples]
    plan = schedule_passes(lengths, world, budget)
    assert Counter(i for rank in plan for members in rank for i in members) == Counter(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    for members in (m for rank in plan for m in rank):
        assert tokens(lengths, members) <= budget or len(members) == 1
    assert schedule_passes(lengths, world, budget) == plan


def test_samples_of_a_prompt_lie_side_by_side_and_large_passes_come_first():
    lengths = draws(0, 64, 8, 5.8, 0.7, 2048)
    plan = schedule_passes(lengths, 8, 12_000)
    for rank in plan:
        for members in rank:
            seen = [lengths[i].prompt for i in members]
            assert sum(a != b for a, b in zip(seen, seen[1:], strict=False)) == len(set(seen)) - 1

    def cost(members):
        prompts = {lengths[i].prompt: lengths[i] for i in members}
        completions = sum(PassCost().completion(lengths[i]) for i in members)
        return completions + sum(PassCost().prompt(prompt) for prompt in prompts.values())

    widest = [max(cost(rank[p]) for rank in plan) for p in range(len(plan[0]))]
    assert widest == sorted(widest, reverse=True)


@pytest.mark.parametrize(
    ("shape", "world", "budget", "passes", "waiting"),
    [
        # 7B, the whole rollout in one update: 64 passes of one sample
        ((64, 8, 5.8, 0.7, 2048), 8, 12_000, 3, 0.10),
        ((8, 8, 5.8, 0.7, 2048), 8, 12_000, 1, 0.60),
        ((64, 4, 6.3, 0.9, 8000), 32, 24_000, 1, 0.40),  # 72B, log-probabilities of the step
    ],
)
def test_passes_and_waiting_at_the_recipes_lengths(shape, world, budget, passes, waiting):
    for seed in range(5):
        lengths = draws(seed, *shape)
        plan = schedule_passes(lengths, world, budget)
        assert len(plan[0]) <= passes

        def cost(members, lengths=lengths):
            return sum(PassCost().completion(lengths[i]) for i in members)

        slowest = sum(max(cost(rank[p]) for rank in plan) for p in range(len(plan[0])))
        assert slowest / (sum(cost(m) for rank in plan for m in rank) / world) - 1 < waiting


def test_a_shared_prompts_keys_are_bounded_too():
    """16 completions of 100 tokens on a prompt of 4,000: all in one pass would take twelve keys per token."""

    def keys(members):
        return sum(
            (4_000 if n == 1 else 4_000 * (n + 1)) + 100 * n
            for n in Counter(lengths[i].prompt for i in members).values()
        )

    lengths = [SampleLength(g, 4_000, 100) for g in range(2) for _ in range(16)]
    plan = schedule_passes(lengths, 1, 12_000)
    assert max(keys(members) for members in plan[0]) <= KEYS * 12_000
    assert len(plan[0]) == 4
    short = [SampleLength(g, 500, 400) for g in range(2) for _ in range(8)]  # a recipe's: nothing is cut
    assert len(schedule_passes(short, 1, 7_400)[0]) == 1


def test_the_limit_of_keys_follows_memory():
    """64 short completions behind a long prompt: a model whose keys are small makes one pass of them, where a
    fixed limit of 4 keys per token made many, each with the whole prompt again."""
    long_prompt = [SampleLength(0, 3_000, 20) for _ in range(64)]
    assert len(schedule_passes(long_prompt, 1, 4_400, keys_per_token=4.0)[0]) == 16
    assert len(schedule_passes(long_prompt, 1, 4_400, keys_per_token=48.0)[0]) == 1
    many = [SampleLength(0, 3_000, 5) for _ in range(512)]
    passes = [len(schedule_passes(many, 1, 12_000, keys_per_token=keys)[0]) for keys in (4.0, 21.0)]
    assert passes == [37, 7], "each computes the prompt once"


def test_small_pieces_help_where_a_group_is_about_a_ranks_share():
    """32 groups of 8 on 32 ranks at a small budget: pieces of a share's size are not dealt evenly."""
    shares = []
    for seed in range(5):
        lengths = draws(seed, 32, 8, 5.8, 0.7, 2048)
        plan = schedule_passes(lengths, 32, 6_500)
        once = sum(map(PassCost().completion, lengths))
        once += sum(PassCost().prompt(x) for x in {x.prompt: x for x in lengths}.values())
        slowest = sum(max(ranks) for ranks in pass_times(plan, lengths, PassCost()))
        shares.append(once / (32 * slowest))
        assert busy_fraction(plan, lengths, PassCost()) > 0.88
    assert sum(shares) / 5 > 0.83


def test_the_busy_share_by_hand():
    """Two ranks, no attention: 30 and 10 tokens in the first pass, 5 and 5 in the second."""
    lengths = [SampleLength(i, 0, n) for i, n in enumerate((30, 10, 5, 5))]
    plan = [[[0], [2]], [[1], [3]]]
    free = PassCost(attended=0.0)
    assert pass_times(plan, lengths, free) == [[30.0, 10.0], [5.0, 5.0]]
    assert busy_fraction(plan, lengths, free) == 50 / (2 * 35)
    assert busy_fraction([[[]], [[]]], [], free) == 1.0


def test_groups_are_cut_only_where_a_rank_would_wait():
    """16 groups of 4 on 32 ranks: whole groups would leave half of the ranks idle. On 4 ranks none is cut."""
    lengths = draws(1, 16, 4, 6.3, 0.4, 8000)
    wide, narrow = schedule_passes(lengths, 32, 12_000), schedule_passes(lengths, 4, 24_000)
    assert sum(bool(rank[0]) for rank in wide) > 24
    homes = Counter(g for rank in narrow for m in rank for g in {lengths[i].prompt for i in m})
    assert set(homes.values()) == {1}


def test_completions_of_no_token_end_too():
    plan = schedule_passes([SampleLength(0, 100, 0)] * 8, 1, 100)
    assert sorted(i for members in plan[0] for i in members) == list(range(8))


def test_more_ranks_than_samples_leave_some_without():
    plan = schedule_passes([SampleLength(0, 5, 3), SampleLength(1, 5, 3)], 4, 100)
    assert sorted(map(len, (rank[0] for rank in plan))) == [0, 0, 1, 1]


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
