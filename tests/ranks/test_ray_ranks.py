"""Ranks as Ray actors: typed calls on all of them, streams that start at once, weights that come to the
driver."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import ray
import torch

from tests.ranks.counting import Counting
from trainer.learning.distributed import DistributedLearner
from trainer.loops.process import connect_ray
from trainer.ranks.process import RankProcess, owner_of_method
from trainer.ranks.ray_ranks import RayRanks


def test_a_method_knows_its_class():
    assert owner_of_method(Counting.call) is Counting and owner_of_method(RankProcess.lengths) is RankProcess


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_calls_streams_and_weights(small_config, tiny_model, tmp_path):
    from transformers import AutoModelForImageTextToText

    config = replace(small_config, method="sft")
    connect_ray(config)
    try:
        ranks = RayRanks(config)
        ranks.start()
        assert ranks.all(Counting.call, 7) == [(0, 7, 1), (1, 7, 1)]
        assert ranks.each(Counting.call, [(1,), (2,)]) == [(0, 1, 2), (1, 2, 2)]
        assert ranks.first(Counting.call, 9) == (0, 9, 3)
        with pytest.raises(ValueError, match="rank 1 has a reason"):
            ranks.all(Counting.fail, 1)

        # It has begun on every rank before anyone looks; the quick rank's results come first.
        mark = str(tmp_path / "begun")
        results = ranks.stream(Counting.slowly, [(mark, 3, 0.05), (mark, 2, 1.0)])
        deadline = time.monotonic() + 20
        while len(list(tmp_path.glob("begun-*"))) < 2:
            assert time.monotonic() < deadline, "nothing runs until it is looked at"
            time.sleep(0.05)
        assert list(results) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
        broken = ranks.stream(Counting.breaks, [(), ()])
        with pytest.raises(ValueError, match="broken in the middle"):
            list(broken)

        learner = DistributedLearner(config, ranks)
        learner.start(10)
        plain = dict(AutoModelForImageTextToText.from_pretrained(tiny_model).named_parameters())
        groups = list(learner.weights(3).groups())
        weights = {name: tensor for group in groups for name, tensor in group}
        assert weights.keys() == plain.keys()
        assert all(torch.equal(weights[name], plain[name]) for name in plain)
        ranks.stop()
    finally:
        ray.shutdown()
