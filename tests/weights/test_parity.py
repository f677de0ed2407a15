"""Engine and policy are the same model, for every family and layout, before and after updates."""

from dataclasses import replace

import pytest

from examples.demo.tiny_model import EXPERTS
from tests.families import BOUNDS, FAMILIES, VISION, dtype, matrix, reroutes
from trainer.hardware import architectures

QUICK = {("qwen2_5_vl", 2, 2, ""), ("qwen3_vl", 1, 1, "")}
EVERY = [(family, n, n, "") for family in FAMILIES for n in (1, 2)]
OTHERS = [("qwen2_5_vl", 2, 1, ""), ("smollm2", 2, 1, "")]
MIXTURES = [name for name, row in architectures.FAMILIES.items() if row.experts]
WHOLE_EXPERTS = [*((name, 2, 2, "experts") for name in MIXTURES), ("qwen3_moe", 4, 2, "experts")]
"""The last one has two engines beside each other."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "world", "tp", "parallel"), matrix(EVERY + OTHERS + WHOLE_EXPERTS, QUICK))
def test_engine_agrees_with_policy(
    run_ranks, small_config, family_model, text_dataset, family, world, tp, parallel
):
    """parallel: what an engine deals to its ranks instead of parts of every matrix."""
    data = small_config.data if family in VISION else replace(small_config.data, path=str(text_dataset))
    config = replace(
        small_config,
        data=data,
        model=replace(small_config.model, path=str(family_model(family)), dtype=dtype(family)),
        placement=replace(small_config.placement, workers_per_node=world),
        rollout=replace(
            small_config.rollout,
            tensor_parallel=tp,
            expert_parallel=parallel == "experts",
            sync_bucket_bytes=1 << 18,
        ),
        optimizer=replace(small_config.optimizer, learning_rate=0.01),
    )
    largest, average = BOUNDS[config.model.dtype]
    for result in run_ranks("parity", config):
        print(family, world, tp, result["gaps"], result["stale"])
        print(result["sync_bytes"], result["bucket_bytes"])
        assert len(result["sync_bytes"]) > 3
        held = max(result["sync_bytes"]) - 2 * result["bucket_bytes"]
        assert held < 1e-3 * result["bucket_bytes"], "more than a bucket and its copy"
        if family in MIXTURES:
            assert result["experts"] == [EXPERTS // tp if parallel else EXPERTS]
        for worst, mean in result["gaps"]:
            assert (worst < largest or reroutes(family)) and mean < average
        moved = max(1e-2, 3 * average)
        assert result["stale"][1] > moved, "the updates moved the policy, so an unsynced engine must differ"
        assert result["reference"], "the reference is the policy before its first update"
        assert result["read"] == [False, True], "the reference has read no file: its weights are the policy's"
        assert result["repeat"], "equal seeds must give equal samples"
        if tp == 1 or result["sampled"]:
            assert result["reversed"], "a prompt's samples must not depend on its neighbours"
            assert result["sampled"] > 500 and result["banned"] == 0
            if family != "smollm2":  # its vocabulary is larger than what is sampled
                assert result["distinct"] > 0.5 * result["vocabulary"], (
                    "hot enough that a banned token would have come up"
                )
