"""How the statistics of ranks and of updates become those of a step."""

import math
from types import SimpleNamespace

import pytest

from trainer.algorithm.batching import TrainItem
from trainer.algorithm.scheduling import Cost
from trainer.config import ConfigError, Optimizer
from trainer.ranks.worker_group import Workers, over_ranks, over_updates


def test_ranks_add_up_but_for_what_they_agree_on_and_for_the_largest():
    a = {"loss/total": 0.25, "mismatch/logprob_abs_max": 3.0, "grad/norm": 2.0, "optim/skipped_updates": 1.0,
         "perf/peak_memory_gib": 5.0, "perf/gathered_gib": 7.0}  # fmt: skip
    b = {**a, "loss/total": 0.5, "mismatch/logprob_abs_max": 4.0, "perf/peak_memory_gib": 4.0}
    assert over_ranks([a, b]) == {"loss/total": 0.75, "mismatch/logprob_abs_max": 4.0, "grad/norm": 2.0,
                                  "optim/skipped_updates": 1.0, "perf/peak_memory_gib": 5.0,
                                  "perf/gathered_gib": 7.0}  # fmt: skip


def test_over_updates_maxima_stay_maxima_counts_add_and_means_go_by_tokens():
    """Three updates of 100, 300 and 100 tokens; the second was skipped and has no gradient norm."""
    loss, worst, norms, skipped = (1.0, 2.0, 4.0), (0.5, 9.0, 0.1), (2.0, None, 6.0), (0.0, 1.0, 0.0)
    stats = [{"loss/total": x, "mismatch/logprob_abs_max": w, "optim/skipped_updates": s, "perf/passes": 2.0,
              "perf/peak_memory_gib": 3.0} | ({} if n is None else {"grad/norm": n})
             for x, w, n, s in zip(loss, worst, norms, skipped, strict=True)]  # fmt: skip
    step = over_updates(stats, [100, 300, 100])
    assert step["loss/total"] == pytest.approx((100 + 600 + 400) / 500)
    assert step["mismatch/logprob_abs_max"] == 9.0 and step["perf/peak_memory_gib"] == 3.0
    assert step["grad/norm"] == pytest.approx(4.0)
    assert step["optim/skipped_updates"] == 1.0 and step["perf/passes"] == 6.0


def test_over_updates_a_skipped_one_spoils_no_mean():
    good, bad = (
        {"loss/total": 1.0, "optim/skipped_updates": 0.0},
        {"loss/total": math.nan, "optim/skipped_updates": 1.0},
    )
    assert over_updates([good, bad], [10, 30]) == {"loss/total": 1.0, "optim/skipped_updates": 1.0}
    assert over_updates([bad, bad], [10, 30]) == {"optim/skipped_updates": 2.0}
    with_nan = over_updates([{**bad, "optim/skipped_updates": 0.0}], [10])
    assert math.isnan(with_nan["loss/total"]), "of an update that was made it is told"


def test_the_run_ends_after_so_many_skipped_updates_in_a_row():
    """A good update between them begins the count again; all of them are counted for the checkpoint."""
    workers: Workers = Workers.__new__(Workers)
    workers.config = SimpleNamespace(optimizer=Optimizer(max_skipped_updates=2))  # ty: ignore[invalid-assignment]
    workers.world_size, workers.skipped, workers.skipped_in_a_row = 1, 0, 0
    workers.facts = {"image_token_id": -1, "micro_batch_tokens": 100, "cost": Cost()}
    fates = iter([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    workers.each = lambda method, calls: [{"optim/skipped_updates": next(fates)}]  # ty: ignore[invalid-assignment]
    items = [TrainItem(0, [1, 2], [3, 4], 1.0)]
    for _ in range(5):
        workers.update(items)
    assert (workers.skipped, workers.skipped_in_a_row) == (4, 2)
    with pytest.raises(ConfigError, match="not finite in 3 updates in a row: start a new run with a"):
        workers.update(items)
