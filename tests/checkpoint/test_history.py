"""Which checkpoints count: the same for finder, retention, budget and a later start, whatever was deleted;
those from before a trouble stay while it lasts, and a run goes back to one of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.synthetic import again, attempt, configure, holds, save, writers
from tests.loops.drill import configure as drill
from tests.loops.jobs import ROOT
from trainer import config as c
from trainer.checkpoint import attempt as attempts
from trainer.checkpoint import place
from trainer.checkpoint.attempt import Attempts, committed_step
from trainer.checkpoint.course import check_resumable
from trainer.checkpoint.manifest import every_manifest, manifests_here, manifests_there, pack
from trainer.config import ConfigError
from trainer.config.run_folder import read_lines
from trainer.system.errors import StorageError
from trainer.system.exit_codes import EXIT_CONFIG

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

    check_resumable(back, "data")
    assert committed_step(back) == 6
    later = attempt(back, told)
    assert (found := later.find()).step == 6 and holds(found, 106)
    save(later, writers(back, 1), 7)  # this store deletes again: the newest stay, not the abandoned
    assert sorted(manifests_there(later.storage)[0]) == [6, 7]
    assert all(int(key[5:13]) in (6, 7) for key, _ in later.storage.list())
    later.close()


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
        patch.setattr(attempts.Attempts, "_counted", lambda *_: None)
        made(config, told, (2, 4, 6)).close()
    assert committed_step(config) == 6
    assert holds(attempt(config, told).find(), 6)
    assert attempt(replace_before(config, 4), told).find().step == 2


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


# --- from before a trouble --------------------------------------------------------------------------------


def steps(checkpoints) -> tuple[list[int], list[int]]:
    """Steps with a checkpoint, here and in the store."""
    return sorted(manifests_here(checkpoints.folder)), sorted(manifests_there(checkpoints.storage)[0])


def test_they_stay_here_and_in_the_store_until_the_trouble_is_over(tmp_path, told):
    config = configure(
        tmp_path, "checkpoint.keep_last=3", "checkpoint.keep_last_remote=3", "checkpoint.keep_good=2"
    )
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    for step in (2, 4, 6):
        save(checkpoints, ranks, step)
    checkpoints.retention.trouble = 7
    for step in (8, 10, 12, 14):
        save(checkpoints, ranks, step)
    assert steps(checkpoints) == ([4, 6, 10, 12, 14], [4, 6, 10, 12, 14])
    assert checkpoints.retention.from_before_the_trouble() == 6
    checkpoints.retention.trouble = 0
    save(checkpoints, ranks, 16)
    assert (
        steps(checkpoints) == ([12, 14, 16], [12, 14, 16])
        and checkpoints.retention.from_before_the_trouble() == 0
    )
    checkpoints.close()


def test_a_disk_without_room_gives_them_up_last(tmp_path, told, monkeypatch):
    config = configure(tmp_path, "checkpoint.keep_last=9")
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    for step in (2, 4, 6, 8):
        save(checkpoints, ranks, step)
    left = []

    def room(*_) -> int:
        left.append(sorted(manifests_here(checkpoints.folder)))
        return 0

    monkeypatch.setattr(place, "disk_room", room)
    checkpoints.retention.trouble = 5
    checkpoints.retention.make_room(1)
    assert left == [[2, 4, 6, 8], [2, 4, 8], [4, 8], [8]]
    checkpoints.close()


def test_a_run_goes_back_and_then_on_from_what_it_makes_there(tmp_path, told):
    """A restart after the return must not return once more, nor go on from what was left behind."""
    config = configure(tmp_path, *MANY)
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    for step in (2, 4, 6, 8):
        save(checkpoints, ranks, step)
    checkpoints.close()

    back = configure(tmp_path, *MANY, "checkpoint.before=6")
    checkpoints, ranks = attempt(back, told), writers(back, 1)
    found = checkpoints.find()
    assert found is not None and found.step == 4 and holds(found, 4)
    assert "step 8 is left out: the run goes back to before step 6 (checkpoint.before)" in told
    checkpoints.close()

    checkpoints, ranks = attempt(back, told), writers(back, 1)  # a kill before the first save changes nothing
    assert (found := checkpoints.find()) is not None and found.step == 4
    save(checkpoints, ranks, 6, seed=60)
    assert steps(checkpoints)[0] == [2, 4, 6] and steps(checkpoints)[1] == [2, 4, 6], "8 is withdrawn"
    checkpoints.close()

    for settings in (back, config):
        checkpoints = attempt(settings, told)
        assert (found := checkpoints.find()) is not None and found.step == 6 and holds(found, 60)
        checkpoints.close()


def test_there_must_be_something_to_go_back_to(tmp_path, told):
    checkpoints, ranks = attempt(configure(tmp_path), told), writers(configure(tmp_path), 1)
    save(checkpoints, ranks, 4)
    checkpoints.close()
    checkpoints = attempt(configure(tmp_path, "checkpoint.before=3"), told)
    with pytest.raises(ConfigError, match="no checkpoint from before step 3: the oldest is of step 4"):
        checkpoints.find()
    checkpoints.close()


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_guards_end_names_the_checkpoint_to_go_back_to(tmp_path):
    """The real session around ranks that pretend: the collapse of step 14 ends it at 16, with checkpoints
    of the trouble beside those from before it. It goes back, and ends."""
    config = drill(tmp_path, 18, 2, standin=True)
    few = replace(config.checkpoint, every_steps=1, keep_last=1, keep_last_remote=1, keep_good=2)
    config = replace(config, guards=c.Guards(end="entropy", patience=3), checkpoint=few)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTRL_", "RAY_"))}
    env |= {"STANDIN_STEP_S": "0.05", "SPOTRL_METADATA": "off"}

    def launch(settings, **extra) -> tuple[int, str]:
        (tmp_path / "run.yaml").write_text(c.dump(settings))
        command = [sys.executable, "-m", "tests.loops.standin", "--config", str(tmp_path / "run.yaml")]
        done = subprocess.run(command, cwd=ROOT, env=env | extra, capture_output=True, text=True, timeout=400)
        return done.returncode, done.stdout + done.stderr

    code, said = launch(config, STANDIN_COLLAPSES="14")
    assert code == EXIT_CONFIG, said
    stands = "guards: trouble since step 14; the checkpoint of step 13 is from before it: "
    assert stands + "`python3 launch.py resume drill --before 14`" in said, said
    assert "the last checkpoint stands" not in said
    here = manifests_here(Path(config.run.dir) / "checkpoints")
    assert 13 in here and max(here) > 13, "keep_last alone would have dropped it"

    back = replace(config, checkpoint=replace(few, before=14))
    code, said = launch(back)
    assert code == 0 and "resumed from step 13" in said, said
    lines = read_lines(Path(config.run.dir) / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 19))
