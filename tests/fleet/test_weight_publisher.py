"""What ranks publish of their shards is what they would gather."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.config import override


@pytest.mark.slow
@pytest.mark.parametrize("world, frozen, hpz, lora", [(2, False, 1, 0), (4, True, 2, 0), (2, False, 1, 4)])
def test_a_mirror_of_every_ranks_patches_holds_the_gathered_weights(
    small_config, run_ranks, tmp_path, world, frozen, hpz, lora
):
    """With adapters (lora: their rank) the patches are theirs, and the mirror merges them in."""
    config = override(
        small_config,
        [
            f"placement.workers_per_node={world}",
            f"model.freeze_vision={str(frozen).lower()}",
            f"optimizer.hpz_ranks={hpz}",
            f"lora.rank={lora}",
            f"checkpoint.remote={tmp_path / 'bucket'}",
            "algorithm.kl_coef=0",
            "optimizer.learning_rate=1e-5",
        ],
    )
    config = replace(config, model=replace(config.model, dtype="bf16"))
    result = run_ranks("published", config)[0]
    assert result["same start"] and result["equal"] == [True, True, True]
    share = [size / result["trained"] for size in result["bytes"]]
    # of the trained weights: half of an adapter begins at zero and changes in every element
    assert max(share) < (0.9 if lora else 0.05), share
    assert not lora or result["trained"] < 0.2 * result["whole"]
    print(share)
