"""Engine and policy are the same model, for every layout, before and after updates."""

from dataclasses import replace

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("world", "tp"), [(1, 1), pytest.param(2, 1, marks=pytest.mark.long), (2, 2)])
def test_engine_agrees_with_policy(run_ranks, small_config, world, tp):
    config = replace(
        small_config,
        placement=replace(small_config.placement, workers_per_node=world),
        rollout=replace(small_config.rollout, tensor_parallel=tp),
        optimizer=replace(small_config.optimizer, learning_rate=0.01),
    )
    for result in run_ranks("parity", config):
        for worst, mean in result["gaps"]:
            assert worst < 1e-4 and mean < 1e-5
        assert result["stale"][1] > 1e-2, "the updates moved the policy, so an unsynced engine must differ"
        assert result["repeat"], "equal seeds must give equal samples"
        if tp == 1 or result["sampled"]:
            assert result["reversed"], "a prompt's samples must not depend on its neighbours"
            assert result["sampled"] > 500 and result["banned"] == 0
            assert result["distinct"] > 0.5 * result["vocabulary"], "hot enough that a banned token would have come up"
