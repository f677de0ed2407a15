"""How the statistics of ranks and of updates become those of a step."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.learning.one_rank import OneRank, trace, trainable
from trainer.algorithm.scheduling import PassCost
from trainer.config import ConfigError, Optimizer, RunConfig
from trainer.learning.distributed import DistributedLearner, join_rank_stats, join_update_stats
from trainer.learning.learner_part import LearnerFacts, build_ahead


def test_ranks_add_up_but_for_what_they_agree_on_and_for_the_largest():
    a = {
        "loss/total": 0.25,
        "mismatch/logprob_abs_max": 3.0,
        "grad/norm": 2.0,
        "optim/skipped_updates": 1.0,
        "perf/peak_memory_gib": 5.0,
        "perf/gathered_gib": 7.0,
    }
    b = {**a, "loss/total": 0.5, "mismatch/logprob_abs_max": 4.0, "perf/peak_memory_gib": 4.0}
    assert join_rank_stats([a, b]) == {
        "loss/total": 0.75,
        "mismatch/logprob_abs_max": 4.0,
        "grad/norm": 2.0,
        "optim/skipped_updates": 1.0,
        "perf/peak_memory_gib": 5.0,
        "perf/gathered_gib": 7.0,
    }


def test_over_updates_maxima_stay_maxima_counts_add_and_means_go_by_tokens():
    """Three updates of 100, 300 and 100 tokens; the second was skipped and has no gradient norm."""
    loss = (1.0, 2.0, 4.0)
    worst = (0.5, 9.0, 0.1)
    norms = (2.0, None, 6.0)
    skipped = (0.0, 1.0, 0.0)
    stats = [
        {
            "loss/total": x,
            "mismatch/logprob_abs_max": w,
            "optim/skipped_updates": s,
            "perf/passes": 2.0,
            "perf/peak_memory_gib": 3.0,
        }
        | ({} if n is None else {"grad/norm": n})
        for x, w, n, s in zip(loss, worst, norms, skipped, strict=True)
    ]
    step = join_update_stats(stats, [100, 300, 100])
    assert step["loss/total"] == pytest.approx((100 + 600 + 400) / 500)
    assert step["mismatch/logprob_abs_max"] == 9.0 and step["perf/peak_memory_gib"] == 3.0
    assert step["grad/norm"] == pytest.approx(4.0)
    assert step["optim/skipped_updates"] == 1.0 and step["perf/passes"] == 6.0


def test_over_updates_a_skipped_one_spoils_no_mean():
    good, bad = (
        {"loss/total": 1.0, "optim/skipped_updates": 0.0},
        {"loss/total": math.nan, "optim/skipped_updates": 1.0},
    )
    assert join_update_stats([good, bad], [10, 30]) == {"loss/total": 1.0, "optim/skipped_updates": 1.0}
    assert join_update_stats([bad, bad], [10, 30]) == {"optim/skipped_updates": 2.0}
    with_nan = join_update_stats([{**bad, "optim/skipped_updates": 0.0}], [10])
    assert math.isnan(with_nan["loss/total"]), "of an update that was made it is told"


def test_an_update_without_completions_is_counted_and_has_no_other_metric():
    """Its step has no mean of anything; beside an update that was made it weighs nothing."""
    called = []
    ranks = SimpleNamespace(world_size=1, all=lambda method: called.append(method.__name__))
    learner = DistributedLearner(RunConfig(), ranks)
    empty = learner.update(trainable([trace(0, [1, 2], [3, 4])], [1.0]).pick([]))
    assert empty == {"optim/empty_updates": 1.0} and called == ["pass_over"] and learner.skipped == 1
    assert join_update_stats([empty, empty], [0, 0]) == {"optim/empty_updates": 2.0}
    made = {"entropy/mean": 1.5, "optim/skipped_updates": 0.0}
    assert join_update_stats([empty, made], [0, 30]) == {**made, "optim/empty_updates": 1.0}


def test_the_run_ends_after_so_many_skipped_updates_in_a_row():
    """A good update between them begins the count again; all of them are counted for the checkpoint."""
    fates = iter([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    ranks = SimpleNamespace(world_size=1, each=lambda method, calls: [{"optim/skipped_updates": next(fates)}])
    learner = DistributedLearner(RunConfig(optimizer=Optimizer(max_skipped_updates=2)), ranks)
    learner.facts = LearnerFacts("", -1, 100, 100, PassCost())
    batch = trainable([trace(0, [1, 2], [3, 4])], [1.0])
    for _ in range(5):
        learner.update(batch)
    assert learner.skipped == 4
    with pytest.raises(ConfigError, match="not finite in 3 updates in a row: start a new run with a"):
        learner.update(batch)


def test_two_things_exist_at_a_time_and_the_first_is_used_before_the_third_is_built():
    built: list[int] = []
    results = build_ahead(lambda thing: built.append(thing) or thing * 10, range(6))
    assert built == []
    for at, result in enumerate(results):
        assert result == at * 10 and len(built) <= at + 2
    assert built == list(range(6))
    assert list(build_ahead(str, [])) == []


def test_an_update_gives_the_policy_one_micro_batch_at_a_time(small_config):
    """The policy's part is to ask for the next; a list of all would hold every image of the step at once."""
    worker = OneRank(small_config)
    made = []
    most = []
    collate = worker.learner.collate
    worker.learner.collate = lambda *arguments: made.append(1) or collate(*arguments)

    class Policy:
        def update(self, batches, count, kl_coef):
            for i, _ in enumerate(batches):
                most.append(len(made) - i)
            return {}

        def logprobs(self, batches, old, reference):
            return self.update(batches, 0, 0.0)

    worker.learner.policy = Policy()
    traces = [trace(1, worker.prompt_ids(1), [5, 6]) for _ in range(5)]
    worker.update([trainable([t], [1.0]) for t in traces], 10, 5)
    worker.logprobs([[t] for t in traces])
    assert len(made) == 10 and len(most) == 10
    assert max(most[:5]) <= 2 and max(m - 5 for m in most[5:]) <= 2


def test_the_next_steps_images_take_half_of_the_cache_even_when_it_is_full(small_config):
    config = replace(small_config, data=replace(small_config.data, image_cache_gib=20 * 4 * 84 * 84 / 2**30))
    worker = OneRank(config)
    reader, split = worker.reader, config.train_split
    rows = [i for i in range(len(worker.train_set)) if worker.train_set[i].images]
    at_work, upcoming = rows[:8], rows[8:]
    for row in upcoming + at_work:  # full, those at work the newest
        reader.decoded(split, row)
    assert reader.cache.held_bytes > 0.9 * reader.cache.limit_bytes
    reader._decode_ahead(split, upcoming)
    held = {key[-1] for key in reader.cache._held}
    assert set(at_work) <= held, "images at work were dropped"
    assert set(upcoming[:8]) <= held
