"""One optimizer step of every objective is its paper's: loss, gradient, weights, to the rounding of fp32."""

from dataclasses import replace

import pytest

from tests.learning.rank_scripts.steps_of_papers import LONGEST, OPTIONS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "world", "live", "budget", "names"),
    [
        ("qwen2_5_vl", 2, 0, 150, "grpo gspo"),
        *(
            pytest.param(*case, " ".join(OPTIONS), marks=pytest.mark.long)
            for case in (
                ("qwen2_5_vl", 1, 0, 150),
                ("qwen2_5_vl", 2, 10_000_000, 1),
                ("qwen2_5_vl", 4, 0, 100_000),
                ("qwen3_vl", 2, 0, 150),
                ("qwen2", 1, 0, 100_000),
                ("qwen3", 2, 10_000_000, 150),
                ("llama", 4, 0, 150),
            )
        ),
    ],
)
def test_a_step_is_the_papers(run_ranks, small_config, family_model, family, world, live, budget, names):
    """Groups of 1 to 5 with several images, one or none, cut between passes and ranks; matrices gathered for
    each half of a pass or kept."""
    config = replace(
        small_config,
        run=replace(small_config.run, name=names),
        model=replace(small_config.model, path=str(family_model(family))),
        placement=replace(small_config.placement, workers_per_node=world),
        rollout=replace(small_config.rollout, max_tokens=LONGEST),
        algorithm=replace(small_config.algorithm, micro_batch_tokens=budget),
        optimizer=replace(
            small_config.optimizer,
            learning_rate=1e-2,
            weight_decay=0.1,
            eps=1e-3,
            max_grad_norm=1e9,
            live_parameters=live,
        ),
    )
    results = run_ranks("steps_of_papers", config)
    for name in names.split():
        first = results[0][name]
        ours = sum(result[name]["loss"] for result in results)
        print(f"{family} on {world}, {name}: loss {ours:.6g}, weights {first['weights']:.1e} of theirs")
        assert ours == pytest.approx(first["their_loss"], rel=1e-5, abs=1e-8), name
        assert first["norm"] < 1e-5 and first["weights"] < 1e-6 < 1e-3 < first["moved"], (name, first)
