"""Engines get about the same work, whatever the prompts' lengths."""

import random

from trainer.algorithm.traces import Prompt
from trainer.sampling.colocated import deal_prompts


def test_shares_are_balanced_where_dealing_in_turn_is_not():
    draw = random.Random(0)
    gaps = []
    in_turn = []
    for _ in range(50):
        costs = [draw.lognormvariate(6, 1) for _ in range(64)]
        prompts = [Prompt(group=i, row=i, seed=i) for i in range(64)]
        shares = deal_prompts(prompts, costs, 8)
        assert sorted(p.group for share in shares for p in share) == list(range(64))
        for share in shares:
            groups = [prompt.group for prompt in share]
            assert groups == sorted(groups)
        assert shares == deal_prompts(prompts, costs, 8)
        for found, parts in ((gaps, shares), (in_turn, [prompts[e::8] for e in range(8)])):
            loads = [sum(costs[p.group] for p in part) for part in parts]
            found.append(max(loads) / (sum(loads) / 8))
    assert sum(gaps) / 50 < 1.05 < 1.3 < sum(in_turn) / 50


def test_equal_prompts_are_dealt_evenly_and_an_engine_may_get_none():
    prompts = [Prompt(group=i, row=i, seed=i) for i in range(4)]
    assert list(map(len, deal_prompts(prompts, [5.0] * 4, 2))) == [2, 2]
    assert list(map(len, deal_prompts(prompts[:1], [5.0], 2))) == [1, 0]
