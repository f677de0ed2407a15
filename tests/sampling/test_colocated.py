"""What colocated engines are asked, and with which weights; the ranks only note what they are called with."""

import random
from typing import Any

import numpy as np
import pytest

from trainer.algorithm.traces import Prompt, completed_trace
from trainer.config import RunConfig, override
from trainer.learning.distributed import RankWeights
from trainer.ranks.ray_ranks import RayRanks
from trainer.sampling.colocated import Colocated, deal_prompts
from trainer.sampling.sampler import SamplingRequest


class NotedRanks(RayRanks):
    """Two ranks that answer every prompt with its row."""

    world_size = 2

    def __init__(self):
        self.calls = []

    def start(self):
        pass

    def each(self, method, arguments):
        self.calls.append((method.__name__, arguments))
        return [None] * self.world_size

    def first(self, method, *args, **kwargs):
        raise AssertionError("sampling is collective")

    def stream(self, method, arguments):
        for rank in reversed(range(self.world_size)):
            self.calls.append((method.__name__, rank))
            for prompt in arguments[rank][0]:
                yield [completed_trace([1], [prompt.row], group=prompt.group, row=prompt.row)]

    def stop(self):
        pass


def ask(config, version, step=7):
    return SamplingRequest(
        kind="train",
        step=step,
        version=version,
        prompts=[Prompt(group=group, row=10 + group, seed=group) for group in range(4)],
        split=config.train_split,
        prompt_tokens=np.ones(20, np.int32),
        samples_per_prompt=1,
        temperature=1.0,
        max_tokens=8,
    )


@pytest.fixture
def colocated():
    ranks: Any = NotedRanks()
    return Colocated(override(RunConfig(), ["placement.workers_per_node=2"]), ranks), ranks


def test_what_it_returns_is_whole_and_in_the_order_of_the_step(colocated):
    sampler, ranks = colocated
    sampler.load(RankWeights(4, ranks))
    sampled = sampler.sample(ask(sampler.config, 4))
    assert [name for name, _ in ranks.calls] == ["load", "sample", "sample"], "all of it is sampled"
    assert sampled.whole and not sampler.overlaps_learning
    assert [trace.group for trace in sampled.all()] == [0, 1, 2, 3]
    assert [trace.row for trace in sampled.all()] == [10, 11, 12, 13], "and may be asked for again"


def test_weights_that_are_not_loaded_sample_nothing(colocated):
    sampler, ranks = colocated
    for version in (-1, 0, 4):
        if version >= 0:
            sampler.load(RankWeights(version, ranks))
        wrong = ask(sampler.config, version + 1)
        with pytest.raises(ValueError, match=f"version {version + 1} .* hold version {version}"):
            sampler.sample(wrong)
    assert "sample" not in [name for name, _ in ranks.calls]


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
