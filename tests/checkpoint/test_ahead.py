"""A checkpoint of a run that samples ahead: committed after the logs that it needs, and never resumed from
without them."""

import time

import pytest

from tests.checkpoint.synthetic import (
    ARCHIVE_DAMAGE,
    configure,
    cut,
    finish,
    resend,
    spoil_archive,
    steps_in,
    whole,
    writers,
)
from tests.checkpoint.test_rollout_log import equal, graded
from trainer.checkpoint.attempt import Attempts
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.manifest import CheckpointError, CorruptCheckpoint
from trainer.checkpoint.rollout_log import RolloutLog
from trainer.config import override


class Attempt:
    """One attempt of a run with staleness 2: its log, its checkpoints, and one rank."""

    def __init__(self, config, told):
        held = Attempts.of(config).take(0)
        self.log = RolloutLog(config, "data", attempt=held, say=told.append)
        self.checkpoints = Checkpoints(config, "data", attempt=held, logs=self.log, say=told.append)
        self.ranks = writers(config, 1)

    def begin(self, step, ahead):
        """Writes the shards of a checkpoint."""
        self.checkpoints.begin(step, {"step": step}, ahead=ahead)
        for rank in self.ranks:
            shards = cut(whole(step), 0, 1)
            rank.start(step, shards, {}, [], self.checkpoints.sends, self.checkpoints.attempt)
            rank.wait()

    def advance(self):
        return self.checkpoints.advance([rank.status() for rank in self.ranks])

    def save(self, step, ahead):
        self.begin(step, ahead)
        finish(self.checkpoints, self.ranks)

    def close(self):
        self.checkpoints.close()
        self.log.close()


@pytest.fixture
def config(tmp_path):
    return configure(tmp_path, "rollout.staleness=2")


@pytest.fixture
def start(config, told):
    """Starts the next attempt of the run."""
    attempts = []

    def started(*assignments):
        attempts.append(Attempt(override(config, [*assignments]), told))
        return attempts[-1]

    yield started
    for attempt in attempts:
        attempt.close()


def test_it_is_committed_after_the_logs_of_what_was_sampled_ahead(start, tmp_path):
    attempt = start()
    attempt.log.write(3, graded(3))
    attempt.begin(2, [3, 4])
    for _ in range(3):
        assert not attempt.advance()
        assert steps_in(tmp_path / "run/checkpoints") == []
    attempt.log.write(4, graded(4))
    assert attempt.advance()
    finish(attempt.checkpoints, attempt.ranks)
    assert steps_in(tmp_path / "run/checkpoints") == steps_in(tmp_path / "remote/test/checkpoints") == [2]
    found = start().checkpoints.find()
    assert found is not None and found.ahead == [3, 4]


def test_one_of_a_run_that_samples_nothing_ahead_is_as_it_was(start, tmp_path):
    attempt = start()
    attempt.save(2, [])
    found = start().checkpoints.find()
    assert found is not None and found.ahead == [] and "ahead" not in found.manifest


def test_the_store_has_the_logs_before_it_has_the_checkpoint(start, tmp_path, told):
    """Where a log does not reach the store, its checkpoint is committed on the disk alone, and sent later."""
    attempt = start()
    in_the_way = tmp_path / "remote/test/rollouts/step-00000004"
    in_the_way.parent.mkdir(parents=True, exist_ok=True)
    in_the_way.write_text("")
    attempt.log.write(3, graded(3))
    attempt.log.write(4, graded(4))
    attempt.save(2, [3, 4])
    assert steps_in(tmp_path / "run/checkpoints") == [2]
    assert steps_in(tmp_path / "remote/test/checkpoints") == []
    assert attempt.checkpoints.progress.failures == 1
    assert any("the rollout log of step 4, sampled ahead, is not in the store" in text for text in told)
    in_the_way.unlink()
    assert resend(attempt.checkpoints, attempt.ranks) == 2
    assert steps_in(tmp_path / "remote/test/checkpoints") == [2]
    assert sorted(p.parent.name for p in (tmp_path / "remote/test/rollouts").rglob("*.npz")) == [
        "step-00000003",
        "step-00000004",
    ]


def test_one_committed_on_the_disk_alone_is_sent_with_its_logs_by_the_next_attempt(start, tmp_path):
    first = start("checkpoint.remote=")
    first.log.write(3, graded(3))
    first.log.write(4, graded(4))
    first.save(2, [3, 4])
    second = start()
    found = second.checkpoints.find()
    assert found is not None
    deadline = time.monotonic() + 60
    while second.checkpoints.progress.safe != 2 and time.monotonic() < deadline:
        second.checkpoints.poll()
        time.sleep(0.05)
    assert steps_in(tmp_path / "remote/test/checkpoints") == [2]
    names = sorted(p.name for p in (tmp_path / "remote/test/rollouts").rglob("*.npz"))
    assert names == [f"{first.checkpoints.attempt}.npz"] * 2, "under the attempt that sampled them"


def test_a_log_that_could_not_be_written_fails_the_checkpoint(start):
    attempt = start()
    attempt.log.place.folder.parent.mkdir(parents=True, exist_ok=True)
    attempt.log.place.folder.write_text("in the way")
    attempt.log.write(3, graded(3))
    attempt.begin(2, [3])
    with pytest.raises(CheckpointError, match="the rollout log of step 3 is not there"):
        attempt.advance()
    attempt.checkpoints.failed("told")
    attempt.log.place.folder.unlink()
    attempt.log.write(4, graded(4))
    attempt.save(3, [4])
    assert attempt.checkpoints.progress.safe == 3


@pytest.mark.parametrize("damage", [*ARCHIVE_DAMAGE, "remove"])
def test_without_its_logs_the_one_before_it_is_taken(start, tmp_path, told, damage):
    first = start()
    for step in (3, 4, 5):
        first.log.write(step, graded(step))
    first.save(2, [3, 4])
    first.save(3, [4, 5])
    first.close()
    for path in tmp_path.rglob("step-00000005*/**/*.npz"), tmp_path.rglob("rollouts/step-00000005.npz"):
        for log in path:
            if damage == "remove":
                log.unlink()
            else:
                spoil_archive(log, damage, "logprobs")
    second = start()
    restored = second.checkpoints.restore(lambda found: second.log.open(found.step, found.ahead))
    assert restored is not None
    found, replayed = restored
    assert found.step == 2 and replayed[:2] == [3, 4]
    assert any("the completions of step 5, which older weights sampled" in text for text in told)
    for step in (3, 4):
        read = second.log.read(step)
        assert read is not None and equal(read, graded(step))
    assert second.log.read(5) is None, "due with the weights of step 2, which are there"


def test_logs_that_a_checkpoint_needs_outlive_the_code_and_an_attempt(start, monkeypatch):
    """What needs no weights that are gone is sampled again, as ever."""
    first = start()
    for step in (3, 4, 5):
        first.log.write(step, graded(step))
    first.save(2, [3, 4])
    second = start()
    second.log.open(2, [3, 4])
    second.log.write(3, graded(3))  # by a newer attempt than that of step 4
    second.close()
    monkeypatch.setattr("trainer.checkpoint.rollout_log.code_fingerprint", lambda: "changed")
    third = start()
    assert third.log.open(2, [3, 4]) == [3, 4]
    assert third.log.read(4) is not None and third.log.read(5) is None
    with pytest.raises(CorruptCheckpoint):
        third.log.open(3, [4, 5, 6])
