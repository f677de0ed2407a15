"""One optimizer step does not depend on micro-batch size, on the number of ranks, or on who holds the pictures."""

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
        ranks = run_ranks("invariance", replace(config, placement=replace(config.placement, workers_per_node=world)))
        for micro in ranks[0]:
            stats = {
                k: sum(r[micro]["stats"][k] for r in ranks)
                for k in ("loss/policy", "loss/total", "kl/mean", "entropy/mean")
            }
            results.append((world, micro, stats, ranks[0][micro]))
    assert [(w, m) for w, m, _, _ in results] == [(1, "1"), (1, "2"), (1, "4"), (2, "1"), (2, "2"), (2, "4")]
    _, _, stats, first = results[0]
    assert first["stats"]["grad/norm"] > 0.01
    for _, _, other, detail in results[1:]:
        same(stats, other, 1e-5)
        assert detail["stats"]["grad/norm"] == pytest.approx(first["stats"]["grad/norm"], rel=1e-5)
        same(first["weights"], detail["weights"], 1e-5)


@pytest.mark.slow
def test_ranks_without_pictures_do_not_hang(run_ranks, small_config):
    config = replace(small_config, optimizer=replace(small_config.optimizer, eps=1e-3))
    result = run_ranks("imageless", config)[0]
    same(result["mixed"], result["apart"], 1e-5)
