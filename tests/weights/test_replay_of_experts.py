"""What vLLM says of its experts is what it computed with: the policy goes through the same."""

from dataclasses import replace

import pytest

from tests.families import BOUNDS, dtype, matrix
from trainer.hardware.architectures import FAMILIES

MIXTURES = [name for name, row in FAMILIES.items() if row.experts]
CASES = [
    (family, kind, tp, False)
    for family in MIXTURES
    for kind in BOUNDS
    for tp in (1, 2)
    if kind in ("bf16", dtype(family))
]
WHOLE_EXPERTS = [(family, dtype(family), 2, True) for family in MIXTURES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "tp", "expert_parallel"),
    matrix(CASES + WHOLE_EXPERTS, {("qwen3_vl_moe", "bf16", 1, False)}),
)
def test_the_policy_goes_through_the_engines_experts(
    run_ranks, small_config, family_model, text_dataset, family, kind, tp, expert_parallel
):
    data = small_config.data
    if not FAMILIES[family].tower:
        data = replace(data, path=str(text_dataset))
    config = replace(
        small_config,
        data=data,
        model=replace(small_config.model, path=str(family_model(family)), dtype=kind),
        algorithm=replace(small_config.algorithm, routing_replay=True),
        placement=replace(small_config.placement, workers_per_node=tp),
        rollout=replace(small_config.rollout, tensor_parallel=tp, expert_parallel=expert_parallel),
    )
    result = run_ranks("replayed", config)[0]
    print(family, kind, tp, expert_parallel, result)
    assert result["shapes"] == [[2, 2]] and result["whole"] and result["one_prompt"]
    assert result["evaluated"], "completions that nobody learns from have none"
    assert result["largest"] == 7, "every expert of eight is chosen for some token"
    largest, average = BOUNDS[kind]
    assert result["replayed"]["largest"] < largest and result["replayed"]["mean"] < average
    # In bf16 some tokens' choices differ, so the replay must bring the two nearer to each other.
    if kind == "bf16":
        assert 0 < result["rerouted"] < 0.1
        assert result["replayed"]["mean"] < result["free"]["mean"]
    else:
        assert result["rerouted"] < 0.01
