"""A start that cannot go on from the run's checkpoint is refused before it replaces a living attempt."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.synthetic import again, save, writers
from tests.small_disk import read_only, small_disk
from trainer import config as c
from trainer.checkpoint.attempt import AttemptFenced, Attempts
from trainer.data.dataset import Dataset
from trainer.node.watch.attempt_holder import AttemptHolder
from trainer.node.watch.run_lock import RunLock
from trainer.system.exit_codes import EXIT_CONFIG

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(small_config, tmp_path):
    """A run with a checkpoint of step 2 in its bucket."""
    remote = f"file://{tmp_path}/bucket"
    config = replace(small_config, checkpoint=replace(small_config.checkpoint, remote=remote))
    data = Dataset(config.data.path, config.data.split).fingerprint
    save(again(config, [], data=data), writers(config, 2), 2)
    return config


def elsewhere(config, tmp_path, *options: str):
    """The same run as another desk starts it."""
    return c.override(config, [f"run.dir={tmp_path}/elsewhere", *options])


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate is 0.5, the checkpoint has 0.001"),
        ("rollout.prompts_per_step=1000", "has 64 rows in split train and a step takes 1000"),
        ("model.path=/nowhere", "neither a folder nor a hub id"),
    ],
)
def test_what_is_refused_leaves_the_living_attempt_alone(config, tmp_path, option, why):
    living = Attempts.of(config).take(2)
    holder = AttemptHolder(elsewhere(config, tmp_path, option), counts=False, trains=True)
    with pytest.raises(c.ConfigError, match=why):
        holder.take()
    living.check()
    assert Attempts.of(config).alive().epoch == living.epoch
    holder.lock.close()


def test_what_can_go_on_replaces_it(config, tmp_path):
    living = Attempts.of(config).take(2)
    holder = AttemptHolder(elsewhere(config, tmp_path), counts=False, trains=True)
    holder.take()
    with pytest.raises(AttemptFenced):
        living.check()
    holder.close(0, "")
    holder.lock.close()


def test_a_run_folder_that_cannot_be_written_is_refused_in_a_line(config, tmp_path):
    """By the launcher, before Ray; by a loop that has none; a read-only mount, since root ignores modes."""
    with small_disk(tmp_path / "disk", 32 << 30) as disk:
        kept = disk / "old"
        kept.mkdir()
        read_only(disk)
        here = c.override(config, [f"run.dir={kept}/run"])
        (tmp_path / "run.yaml").write_text(c.dump(here))
        command = [sys.executable, "-m", "trainer.node", "--config", str(tmp_path / "run.yaml")]
        began = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == EXIT_CONFIG, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert f"{kept}/run cannot be written (run): mount it writable, or set run.dir" in line
        assert "Traceback" not in done.stderr and "starting Ray" not in done.stdout
        print(f"refused after {time.monotonic() - began:.1f} s")
        with pytest.raises(
            c.ConfigError, match=r"cannot be written \(Read-only file system\): choose another"
        ):
            RunLock(here.run.dir, "driver").take()
