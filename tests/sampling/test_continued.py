"""Completions that go on under newer weights, on engines of several ranks, with adapters, and with the states
of gated delta-net layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.families import BOUNDS, VISION, dtype
from tests.learning.rank_scripts.continued_completions import CUT
from trainer import config as c

ADAPTERS = {"rank": 4, "alpha": 8}
CASES = [
    *(("qwen2_5_vl", tp, adapted) for tp in (1, 2) for adapted in (False, True)),
    *(("qwen3_5", tp, adapted) for tp in (1, 2) for adapted in (False, True)),
]


@pytest.mark.long
@pytest.mark.parametrize(("family", "tp", "adapted"), CASES)
def test_each_piece_agrees_with_the_policy_of_its_version(
    run_ranks, small_config, family_model, family, tp, adapted
):
    assert family in VISION, "rows with images are among them"
    config = replace(
        small_config,
        model=replace(small_config.model, path=str(family_model(family)), dtype=dtype(family)),
        placement=replace(small_config.placement, workers_per_node=tp),
        rollout=replace(small_config.rollout, tensor_parallel=tp),
        optimizer=replace(small_config.optimizer, learning_rate=0.01),
        lora=c.LoRA(**ADAPTERS) if adapted else c.LoRA(),
    )
    largest, average = BOUNDS[config.model.dtype]
    for found in run_ranks("continued_completions", config):
        print(family, tp, adapted, found)
        for worst, mean in (found["begun"], found["newer"]):
            assert worst < largest and mean < average
        assert found["older"][1] > max(1e-2, 3 * average), "the update moved the policy"
        assert found["kept"], "what older weights sampled stays as it was"
        assert found["repeated"], "what goes on is a function of what there was"
        # In bf16 a CPU's sums depend on how many rows are computed at once.
        assert found["tokens_beside"] or config.model.dtype == "bf16"
        for segments, (shared, count, end) in zip(found["segments"], found["pieces"], strict=True):
            assert segments == [[shared, 0], [shared + CUT, 1]][: 1 + (count > CUT)] and end != "cut"
        assert found["newest_tokens"] > 4 * CUT
