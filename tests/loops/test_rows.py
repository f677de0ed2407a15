"""Rows as datasets have them: prompts too long for training or for the engine, and rows with more images than
most."""

import random
from dataclasses import replace

import pytest

from tests.conftest import make_rows
from tests.loops.jobs import REWARD, Job
from tests.soak.rows import image
from trainer import config as c


def with_images(row, others):
    """The row with the images of others on top."""
    extra = [data for other in others for data in other.images]
    content = row.messages[0]["content"] + [{"type": "image"} for _ in extra]
    return replace(row, messages=[{"role": "user", "content": content}], images=row.images + extra)


def longer(row, words):
    """The row with a prompt of so many more words, each a token or more."""
    content = [{"type": "text", "text": "triangle " * words}, *row.messages[0]["content"]]
    return replace(row, messages=[{"role": "user", "content": content}])


@pytest.fixture(scope="module")
def ragged(tmp_path_factory):
    """72 training rows: the first third too long, row 66 with two images, six with images that EXIF turns or
    that have 16 bits. 5 held-out ones: one too long, one with 4 images."""
    from data_prep.write.shards import write_dataset

    train, test = list(make_rows("train", 72)), list(make_rows("test", 5))
    train[:24] = [longer(row, 400) for row in train[:24]]
    train[66] = with_images(train[66], train[67:68])
    for i, mode in zip(range(30, 36), ("turned", "I;16") * 3, strict=True):
        train[i] = replace(train[i], images=[image(random.Random(i), (112, 56), mode)])
    test[1] = longer(test[1], 400)
    test[3] = with_images(test[3], test[:1] + test[2:3] + test[4:])
    out = tmp_path_factory.mktemp("data") / "ragged"
    write_dataset(out, "ragged", {"train": train, "test": test}, {})
    return out


@pytest.mark.slow
@pytest.mark.long
def test_a_run_survives_ragged_rows_and_counts_what_it_leaves_out(small_config, ragged, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    config = replace(
        small_config,
        run=replace(small_config.run, max_steps=0),
        data=replace(small_config.data, path=str(ragged)),
        rollout=replace(small_config.rollout, prompts_per_step=4, samples_per_prompt=2),
        optimizer=replace(small_config.optimizer, schedule="cosine"),
        evaluation=c.Evaluation(every_steps=50),
        rewards=c.Rewards(workers=1, function=f"{tmp_path / 'reward.py'}:reward"),
        placement=replace(small_config.placement, workers_per_node=1),
    )
    job = Job(config, tmp_path / "job").start()
    try:
        assert job.wait(400) == 0, job.tail()
    finally:
        job.kill()
    lines = job.metrics()
    assert [line["step"] for line in lines] == list(range(13)), "48 usable rows, four per step"
    for line in (lines[0], lines[-1]):
        assert line["eval/too_long"] == 1
        assert 0 < line["eval/accuracy"] <= 4 / 5, "the prompt that was not asked stays in the denominator"
    assert all(line["data/left_out"] == 24 for line in lines[1:])
    assert all(line["mismatch/logprob_abs_max"] < 1e-3 for line in lines[1:]), (
        "engine and policy see other images"
    )
    rates = [line["optim/lr"] for line in lines[1:]]
    assert rates[-1] < 0.05 * config.optimizer.learning_rate, "the schedule must end with the usable rows"
    assert "24 of 72 rows of train left out: 24 prompts over 300 tokens" in job.tail(100_000)
