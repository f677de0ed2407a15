"""One optimizer step does not depend on the token budget, on the number of ranks, or on who holds the
images."""

from dataclasses import replace

import pytest


def same(a: dict, b: dict, tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == pytest.approx(b[name], rel=tolerance, abs=tolerance), name


@pytest.mark.slow
def test_step_is_invariant_to_micro_batch_and_ranks(run_ranks, small_config):
    config = replace(small_config, optimizer=replace(small_config.optimizer, max_grad_norm=1e9, eps=1e-3))
    results = []
    for world in (1, 2):
        ranks = run_ranks(
            "invariance", replace(config, placement=replace(config.placement, workers_per_node=world))
        )
        for micro in ranks[0]:
            stats = {
                f"{objective}: {k}": sum(r[micro]["stats"][objective][k] for r in ranks)
                for objective in ranks[0][micro]["stats"]
                for k in ("loss/policy", "loss/total", "kl/mean", "entropy/mean", "ratio/mean", "mismatch/kl")
            }
            results.append((world, micro, stats, ranks[0][micro]))
    assert [(w, m) for w, m, _, _ in results] == [(w, m) for w in (1, 2) for m in ("1", "120", "10000")]
    assert [d["stats"]["grpo"]["perf/passes"] for w, _, _, d in results if w == 1][0::2] == [8, 1]
    _, _, stats, first = results[0]
    assert len(first["stats"]) == 5 and all(s["grad/norm"] > 0.01 for s in first["stats"].values())
    for _, _, other, detail in results[1:]:
        same(stats, other, 1e-5)
        for objective, s in detail["stats"].items():
            assert s["grad/norm"] == pytest.approx(first["stats"][objective]["grad/norm"], rel=1e-5), (
                objective
            )
        same(first["weights"], detail["weights"], 1e-5)


@pytest.mark.slow
def test_ranks_without_images_do_not_hang(run_ranks, small_config):
    config = replace(small_config, optimizer=replace(small_config.optimizer, eps=1e-3))
    result = run_ranks("imageless", config)[0]
    same(result["mixed"], result["apart"], 1e-5)


def test_an_update_without_completions_moves_nothing(run_ranks, small_config):
    """A step of Adam moves weights by momentum and decay even where the gradient is 0."""
    decay = replace(small_config.optimizer, learning_rate=1e-2, weight_decay=0.1)
    for result in run_ranks("emptied", replace(small_config, optimizer=decay)):
        before, passed_over, made = result["shards"]
        assert before == passed_over != made and result["updates"] == [1, 2]


@pytest.mark.parametrize("live", [0, 10_000_000])
def test_a_bad_gradient_leaves_weights_alone_and_gathers_are_counted(run_ranks, small_config, live):
    config = replace(small_config, optimizer=replace(small_config.optimizer, live_parameters=live))
    for result in run_ranks("skipping", config):
        skipped = [s["optim/skipped_updates"] for s in result["stats"]]
        assert skipped == [0, 1, 0] and "grad/norm" not in result["stats"][1]
        assert result["shards"][0] == result["shards"][1] != result["shards"][2]
        assert result["resumed"] == result["shards"][2]
        # Kept from forward to backward pass, a pass gathers the sharded weights once; let go of, once more.
        once = 2 if live == 0 else 1
        assert [gib / result["model_gib"] for gib in result["update_gib"]] == [once, 4 * once]


@pytest.mark.parametrize("accumulate", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
def test_gradients_add_up_without_loss(run_ranks, small_config, accumulate):
    """64 equal shares of a gradient are the gradient, in fp32; in bf16 the later ones are small beside the
    sum."""
    config = replace(
        small_config,
        model=replace(small_config.model, dtype="bf16"),
        optimizer=replace(
            small_config.optimizer, learning_rate=0.0, max_grad_norm=1e9, grad_accum_dtype=accumulate
        ),
        placement=replace(small_config.placement, workers_per_node=1),
    )
    result = run_ranks("accumulation", config)[0]
    assert result["buffer"] == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[accumulate]
    off = abs(result["many"] / result["one"] - 1)
    assert off < 1e-6 if accumulate == "fp32" else 1e-4 < off < 0.1, off
