"""Checkpoints from before a trouble stay while it lasts, and a run goes back to one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.synthetic import attempt, configure, holds, save, writers
from tests.loops.drill import configure as drill
from trainer import config as c
from trainer.checkpoint import retention
from trainer.checkpoint.manifest import manifests_here, manifests_there
from trainer.config import ConfigError
from trainer.config.run_folder import read_lines
from trainer.system.exit_codes import EXIT_CONFIG

ROOT = Path(__file__).parents[2]
FEW = ("checkpoint.keep_last=1", "checkpoint.keep_last_remote=1", "checkpoint.keep_good=2")


def steps(checkpoints) -> tuple[list[int], list[int]]:
    """Steps with a checkpoint, here and in the store."""
    return sorted(manifests_here(checkpoints.folder)), sorted(manifests_there(checkpoints.storage)[0])


def test_they_stay_here_and_in_the_store_until_the_trouble_is_over(tmp_path, told):
    config = configure(tmp_path, *FEW, "checkpoint.keep_last=3", "checkpoint.keep_last_remote=3")
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

    monkeypatch.setattr(retention, "disk_room", room)
    checkpoints.retention.trouble = 5
    checkpoints.retention.make_room(1)
    assert left == [[2, 4, 6, 8], [2, 4, 8], [4, 8], [8]]
    checkpoints.close()


def test_a_run_goes_back_and_then_on_from_what_it_makes_there(tmp_path, told):
    """A restart after the return must not return once more, nor go on from what was left behind."""
    config = configure(tmp_path, "checkpoint.keep_last=9", "checkpoint.keep_last_remote=9")
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    for step in (2, 4, 6, 8):
        save(checkpoints, ranks, step)
    checkpoints.close()

    back = configure(
        tmp_path, "checkpoint.keep_last=9", "checkpoint.keep_last_remote=9", "checkpoint.before=6"
    )
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
