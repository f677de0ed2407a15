"""What is prepared beside the computation is bounded: a step's micro-batches, and the next step's images."""

from __future__ import annotations

from dataclasses import replace

from tests.learning.one_rank import OneRank, trace, trainable
from trainer.learning.learner_part import build_ahead


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
