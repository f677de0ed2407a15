"""Which checkpoints count: the same for finder, retention, budget and a later start, whatever was deleted."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from tests.checkpoint.synthetic import again, attempt, configure, holds, save, writers
from trainer.checkpoint import attempt as attempts
from trainer.checkpoint.attempt import Attempts, committed_step
from trainer.checkpoint.course import check_resumable
from trainer.checkpoint.manifest import every_manifest, manifests_there, pack
from trainer.config import ConfigError
from trainer.system.errors import StorageError

FEW = ("checkpoint.keep_last=2", "checkpoint.keep_last_remote=2", "checkpoint.keep_good=0")
MANY = ("checkpoint.keep_last=9", "checkpoint.keep_last_remote=9")


def made(config, told, steps, seed=0):
    """The checkpoints of a new attempt that has resumed and saved these steps."""
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    checkpoints.find()
    for step in steps:
        save(checkpoints, ranks, step, seed=seed + step)
    return checkpoints


@pytest.fixture(params=[ConfigError("deletion: no right (403)"), StorageError("deletion failed 6 times")])
def undeletable(request, monkeypatch):
    """Has a store refuse to delete manifests, for good or for as long as it is asked."""

    def refusing(checkpoints):
        delete = checkpoints.storage.delete

        def refuse(keys):
            keys = list(keys)
            if any(key.endswith("/manifest.json") for key in keys):
                raise request.param
            delete(keys)

        monkeypatch.setattr(checkpoints.storage, "delete", refuse)

    return refusing


@pytest.mark.parametrize("fresh", [False, True])
def test_what_a_run_went_back_from_never_counts_again(tmp_path, told, undeletable, fresh):
    made(configure(tmp_path, *MANY), told, (2, 4, 6, 8)).close()
    back = configure(tmp_path, *FEW, "checkpoint.before=6")
    checkpoints, ranks = attempt(back, told), writers(back, 1)
    assert checkpoints.find().step == 4
    undeletable(checkpoints)
    for step in (5, 6):
        save(checkpoints, ranks, step, seed=100 + step)
    checkpoints.close()
    assert {step for step, _ in every_manifest(checkpoints.storage)[0]} >= {4, 5, 6, 8}, "nothing is deleted"
    assert any("stay in the store" in text for text in told), "and that is said"
    if fresh:
        shutil.rmtree(tmp_path / "run")

    for config in (
        back,
        configure(tmp_path, *FEW),
    ):  # a restart; a start that no longer says where to go back
        check_resumable(config, "data")
        assert committed_step(config) == 6
        later = attempt(config, told)
        assert (found := later.find()).step == 6 and holds(found, 106)
        save(later, writers(config, 1), 7)  # this store deletes again: the newest stay, not the abandoned
        assert sorted(manifests_there(later.storage)[0]) == [6, 7]
        assert all(int(key[5:13]) in (6, 7) for key, _ in later.storage.list())
        later.close()
        break


def test_retention_keeps_the_good_ones_and_drops_those_left_behind_first(tmp_path, told):
    made(configure(tmp_path, *MANY), told, (2, 4, 6, 8)).close()
    back = configure(tmp_path, *FEW, "checkpoint.before=6")
    checkpoints = made(back, told, (5,), seed=100)
    assert sorted(manifests_there(checkpoints.storage)[0]) == [4, 5], "8 and 6 went, 4 stayed"
    assert sorted(path.name for path in checkpoints.folder.glob("step-*")) == [
        "step-00000004",
        "step-00000005",
    ]
    checkpoints.close()


def test_a_damaged_newer_one_does_not_push_out_what_follows_it(tmp_path, told, undeletable):
    config = configure(tmp_path, *FEW)
    made(config, told, (2, 4, 6)).close()
    shutil.rmtree(tmp_path / "run")
    next((tmp_path / "remote/test/checkpoints/step-00000006").rglob("*.safetensors")).unlink()
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    assert checkpoints.find().step == 4
    undeletable(checkpoints)
    save(checkpoints, ranks, 5)
    checkpoints.close()
    assert committed_step(config) == 5
    assert attempt(config, told).find().step == 5


def test_a_manifest_that_lands_after_a_takeover_is_no_checkpoint(tmp_path, told):
    config = configure(tmp_path, *MANY)
    older = made(config, told, (2, 4))
    late, sizes = every_manifest(older.storage)
    older.close()
    shutil.rmtree(tmp_path / "run")
    newer = attempt(config, told)
    # What the older one had begun to put arrives now, whole, as step 6.
    folder = tmp_path / "remote/test/checkpoints"
    shutil.copytree(folder / "step-00000004", folder / "step-00000006")
    inside = folder / f"step-00000006/{older.attempt}/manifest.json"
    inside.write_bytes(pack(late[4, older.attempt] | {"step": 6}))
    assert (6, older.attempt) in every_manifest(newer.storage)[0]

    assert newer.find().step == 4 and committed_step(config) == 4
    assert again(config, told).find().step == 4
    save(newer, writers(config, 1), 5)
    newer.close()
    assert (6, older.attempt) not in every_manifest(newer.storage)[0], "retention has tidied it away"
    third = attempt(config, told)
    assert third.find().step == 5
    assert any("step 6 is left out: the run went on without it" in text for text in told)


def test_an_attempt_that_never_trained_keeps_the_history(tmp_path, told):
    """One whose machine failed its checks has no configuration: it says nothing of checkpoints."""
    config = configure(tmp_path, *MANY)
    made(config, told, (2, 4)).close()
    back = made(replace_before(config, 4), told, (3,))
    back.close()
    Attempts(back.place.attempt.record.storage).take(0)
    assert committed_step(config) == 3 and attempt(config, told).find().step == 3


def replace_before(config, before):
    return replace(config, checkpoint=replace(config.checkpoint, before=before))


def test_a_record_of_an_older_version_lets_every_checkpoint_count(tmp_path, told, monkeypatch):
    config = configure(tmp_path, *MANY)
    with monkeypatch.context() as patch:
        patch.setattr(attempts.Attempts, "_counted", lambda *_: {})
        made(config, told, (2, 4, 6)).close()
        # It went back, and has made 4 since then.
        made(replace_before(config, 4), told, (4,), seed=100).close()
    assert committed_step(config) == 4
    assert holds(attempt(replace_before(config, 4), told).find(), 104)
    assert holds(attempt(config, told).find(), 104)


def test_a_persons_file_in_a_step_that_goes_stays(tmp_path, told):
    config = configure(tmp_path, "checkpoint.keep_last=1", "checkpoint.keep_last_remote=1")
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    save(checkpoints, ranks, 2)
    here, there = checkpoints.folder / "step-00000002", tmp_path / "remote/test/checkpoints/step-00000002"
    mine = [
        here / "notes.txt",
        there / "notes.txt",
        there / checkpoints.attempt / "eval-of-mine.json",
        here / "my/x",
    ]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    for step in (4, 6):
        save(checkpoints, ranks, step)
    checkpoints.close()
    assert all(path.read_text() == "mine" for path in mine)
    left = {path for folder in (here, there) for path in folder.rglob("*") if path.is_file()}
    assert left == set(mine)
