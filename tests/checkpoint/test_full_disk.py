"""A disk that is really full (a small tmpfs; needs root), in each phase that writes: the ranks' files, the
commit, the download of a resume. What was committed stays, one line says it, the exit code is 35."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.checkpoint.synthetic import again, attempt, configure, cut, finish, holds, save, whole, writers
from trainer.checkpoint import writer as writing
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.reader import fetch_all
from trainer.exit_codes import EXIT_STORAGE
from trainer.loops.process import explain

DISK_BYTES = 1 << 20


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """The folder of a run on a disk of a MiB. That there is room is not looked up: it may go meanwhile."""
    path = tmp_path / "run"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    monkeypatch.setattr(writing, "disk_room", lambda folder, limit: 1 << 40)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Takes all that is free."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return filler


def begin(checkpoints, ranks, step: int) -> None:
    checkpoints.begin(step, {"step": step, "offset": 8 * step})
    for rank in ranks:
        shards = cut(whole(step), rank.rank, rank.world_size)
        rank.start(step, shards, {}, checkpoints.local_steps(), checkpoints.sends, checkpoints.attempt)


def test_while_ranks_write_and_at_the_commit(disk, tmp_path, told):
    config = configure(tmp_path)
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    save(checkpoints, ranks, 2)

    filler = fill(disk)
    begin(checkpoints, ranks, 4)
    with pytest.raises(CheckpointError, match="rank 0 could not write its checkpoint: .*No space left"):
        finish(checkpoints, ranks)
    checkpoints.failed("rank 0 could not write")
    assert not list((checkpoints.folder / "step-00000004").glob("*"))
    filler.unlink()

    begin(checkpoints, ranks, 5)
    while 5 not in ranks[0].status().written:
        time.sleep(0.01)
    filler = fill(disk)
    finish(checkpoints, ranks)
    assert any("the commit of step 5 failed" in text and "No space left" in text for text in told)
    assert (checkpoints.failures, checkpoints.committed) == (2, 2)
    filler.unlink()

    save(checkpoints, ranks, 6)
    assert checkpoints.safe == 6 and checkpoints.failures_in_a_row == 0
    assert holds(again(config, told).find(), 6)


def test_while_a_resume_fetches(disk, tmp_path, told):
    config = configure(tmp_path)
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    save(checkpoints, ranks, 2)
    for path in (checkpoints.folder / "step-00000002").iterdir():
        path.unlink()
    found = again(config, told).find()
    filler = fill(disk)
    with pytest.raises(OSError) as error:
        fetch_all(found)
    code, line = explain(error.value)
    assert code == EXIT_STORAGE and "No space left on device" in line and "\n" not in line
    filler.unlink()
    fetch_all(found)
    assert holds(again(config, told).find(), 2)
