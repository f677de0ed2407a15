"""What is prepared beside the computation is bounded: a step's micro-batches, and the next step's images."""

from __future__ import annotations

from dataclasses import replace

from trainer.learning.prefetch import ahead
from trainer.ranks.gpu_worker import Worker


def test_two_things_exist_at_a_time_and_the_first_is_used_before_the_third_is_built():
    built: list[int] = []
    results = ahead(lambda thing: built.append(thing) or thing * 10, range(6))
    assert built == []
    for at, result in enumerate(results):
        assert result == at * 10 and len(built) <= at + 2
    assert built == list(range(6))
    assert list(ahead(str, [])) == []


def test_an_update_gives_the_policy_one_micro_batch_at_a_time(small_config):
    """The policy's part is to ask for the next; a list of all would hold every image of the step at once."""
    worker, made, most = Worker(small_config), [], []
    collate = worker._collate
    worker._collate = lambda *arguments: made.append(1) or collate(*arguments)

    class Policy:
        def update(self, batches, count, kl_coef):
            for i, _ in enumerate(batches):
                most.append(len(made) - i)
            return {}

        def logprobs(self, batches, old, reference):
            return self.update(batches, 0, 0.0)

    worker.policy = Policy()
    row = worker._prompt(1)
    items = [replace(item, row=1, prompt_token_ids=row.token_ids) for item in _items(5)]
    worker.update([[item] for item in items], 10, 5, 0.0)
    worker.logprobs([[item] for item in items], True, False)
    assert len(made) == 10 and len(most) == 10
    assert max(most[:5]) <= 2 and max(m - 5 for m in most[5:]) <= 2


def _items(count):
    from trainer.algorithm.batching import TrainItem

    return [TrainItem(0, [1], [5, 6], 1.0) for _ in range(count)]


def test_the_next_steps_images_take_half_of_the_cache_even_when_it_is_full(small_config):
    config = replace(small_config, data=replace(small_config.data, image_cache_gib=20 * 4 * 84 * 84 / 2**30))
    worker = Worker(config)
    rows = [i for i in range(len(worker.train_set)) if worker.train_set[i].images]
    at_work, upcoming = rows[:8], rows[8:]
    for row in upcoming + at_work:  # full, those at work the newest
        worker._decoded(config.data.path, "train", row)
    assert worker.images.held_bytes > 0.9 * worker.images.limit_bytes
    worker._look_ahead(upcoming)
    held = {key[-1] for key in worker.images._held}
    assert set(at_work) <= held, "images at work were dropped"
    assert set(upcoming[:8]) <= held
