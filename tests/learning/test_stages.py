"""ZeRO stages 1, 2 and 3 are one computation, that of plain torch in one process, with one format of
checkpoints."""

from dataclasses import replace

import pytest

from trainer import config as c
from trainer.hardware.architectures import FAMILIES

OTHERS = [name for name, row in FAMILIES.items() if row.experts or row.gated_delta]


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "lora", "offload", "dtype", "family"),
    [
        (2, 0, False, "fp32", "qwen2_5_vl"),
        (1, 0, False, "fp32", "qwen2_5_vl"),
        (1, 4, False, "fp32", "qwen2_5_vl"),
        (2, 4, False, "fp32", "qwen2_5_vl"),
        (2, 0, True, "fp32", "qwen2_5_vl"),
        (2, 0, False, "bf16", "qwen2_5_vl"),
        (2, 4, False, "bf16", "qwen2_5_vl"),
        *((2, 0, False, "fp32", name) for name in OTHERS),
    ],
)
def test_every_stage_learns_what_plain_torch_learns(
    run_ranks, small_config, family_model, world, lora, offload, dtype, family
):
    """Loss and gradients of a step, packed and in several passes; a resume, bit for bit; checkpoints of all
    stages."""
    config = replace(
        small_config,
        model=replace(
            small_config.model, path=str(family_model(family)), gradient_checkpointing=True, dtype=dtype
        ),
        lora=c.LoRA(rank=lora, alpha=8),
        optimizer=replace(small_config.optimizer, learning_rate=1e-2, offload_optimizer=offload),
        placement=replace(small_config.placement, workers_per_node=world),
    )
    exact = dtype == "fp32"  # plain torch always is
    loose, near = (1e-5, 1e-4) if exact else (2e-2, 5e-2)
    for result in run_ranks("zero_stages", config):
        for stage, found in result["stages"].items():
            assert found["losses"] == pytest.approx([result["loss"]] * 2, rel=loose), stage
            for together, worst in found["gradients"]:
                assert together < (1e-5 if exact else near) and (worst < near or not exact), (
                    stage,
                    together,
                    worst,
                )
            assert found["norm"] == pytest.approx(result["stages"]["3"]["norm"], rel=loose)
            assert found["moved"] and found["resumed"] and found["again"], stage
        assert len(result["elsewhere"]) == 9
        for where, (whole, loss) in result["elsewhere"].items():
            origin = where.split()[0]
            assert whole and loss == pytest.approx(
                result["elsewhere"][f"{origin} at {origin}"][1], rel=loose
            ), where


def test_another_stage_may_resume():
    one, three = (c.RunConfig(method="sft", optimizer=c.Optimizer(zero_stage=n)) for n in (1, 3))
    assert c.resume_view(one) == c.resume_view(three)
