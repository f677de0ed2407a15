"""A disk that is really full or cannot be written (a small tmpfs; needs root), in each phase that writes: the
ranks' files, the commit, the download of a resume, the rollout log, metrics and progress, the export, the
model's download. What was committed stays, one line says it, the exit code is 35."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.synthetic import again, attempt, configure, cut, finish, holds, save, whole, writers
from tests.checkpoint.test_export import checkpointed, saved_model
from tests.checkpoint.test_rollout_log import equal, graded
from tests.data_prep import hub_server
from tests.loops import drill
from tests.loops.jobs import Job
from tests.small_disk import fill, read_only, small_disk
from trainer.checkpoint import writer as writing
from trainer.checkpoint.hf_export import export_hf
from trainer.checkpoint.layout import newest_step
from trainer.checkpoint.manifest import CheckpointError
from trainer.checkpoint.rollout_log import RolloutLog
from trainer.checkpoint.shard_reader import fetch_rank
from trainer.config import Model, RunConfig, override
from trainer.loops.process import explain_error
from trainer.node.__main__ import explain as explain_launch
from trainer.observe.history import read_history
from trainer.observe.metrics import Metrics
from trainer.observe.phases import Phases
from trainer.storage import hub
from trainer.system.exit_codes import EXIT_STORAGE

DISK_BYTES = 1 << 20


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """The folder of a run on a disk of a MiB. That there is room is not looked up: it may go meanwhile."""
    monkeypatch.setattr(writing, "disk_room", lambda folder, limit: 1 << 40)
    with small_disk(tmp_path / "run", DISK_BYTES) as path:
        yield path


def told_in_a_line(error: Exception, why: str = "No space left on device") -> None:
    """By the loop, and by the launcher, whose log is on the same disk."""
    code, line = explain_error(error)
    assert code == EXIT_STORAGE and why in line and "\n" not in line and line.startswith("error: "), line
    if isinstance(error, OSError):
        code, line = explain_launch(error, None)
        assert code == EXIT_STORAGE and why in line and "\n" not in line, line


def begin(checkpoints, ranks, step: int) -> None:
    checkpoints.begin(step, {"step": step, "offset": 8 * step})
    for rank in ranks:
        shards = cut(whole(step), rank.rank, rank.world_size)
        rank.start(
            step, shards, {}, checkpoints.retention.local_steps(), checkpoints.sends, checkpoints.attempt
        )


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
    assert (checkpoints.progress.failures, checkpoints.progress.committed) == (2, 2)
    filler.unlink()

    save(checkpoints, ranks, 6)
    assert checkpoints.progress.safe == 6 and checkpoints.progress.failures_in_a_row == 0
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
        fetch_rank(found, 0, 1)
    told_in_a_line(error.value)
    filler.unlink()
    fetch_rank(found, 0, 1)
    assert holds(again(config, told).find(), 2)


def test_while_completions_are_logged(disk, tmp_path, told):
    """The log saves work and guards none: the run goes on, and a restart samples the step again."""
    config = configure(tmp_path)
    log = RolloutLog(config, "data", say=told.append)
    log.write(1, graded(1))
    filler = fill(disk)
    log.write(2, graded(2))
    assert any("step 2 is not logged" in text and "No space left" in text for text in told)
    assert log.metrics()["perf/rollout_log_failures"] == 1
    assert sorted(path.name for path in log.place.folder.iterdir()) == ["step-00000001.npz"]
    with pytest.raises(CheckpointError, match="the rollout log of step 2 is not there: .*No space left"):
        log.durable([2])
    filler.unlink()
    log.write(3, graded(3))
    log.close()
    (disk.parent / "remote").rename(disk.parent / "away")
    later = RolloutLog(config, "data", say=told.append)
    assert later.open(0) == [1] and equal(later.read(1), graded(1))
    later.close()


def test_while_metrics_and_progress_are_written(disk, tmp_path):
    """A torn line is dropped when the run goes on, and none of before is lost."""
    config = override(configure(tmp_path), ["logging.tensorboard=false"])
    phases = Phases(disk)
    metrics = Metrics(disk, config)
    metrics.log(1, {"loss/total": 0.5})
    kept = (disk / "metrics.jsonl").stat().st_size
    filler = fill(disk)
    with pytest.raises(OSError) as error:
        for step in range(2, 200):
            metrics.log(step, {"loss/total": 0.5})
    told_in_a_line(error.value)
    with pytest.raises(OSError) as error, phases("update"):
        pass
    told_in_a_line(error.value)
    assert not list(disk.glob(".progress*")), "nothing half-written is left"
    with (disk / "metrics.jsonl").open("ab") as file:
        filler.unlink()
        file.write(b'{"loss/total": 0.5, "st')
    whole_steps = [record["step"] for record in read_history(disk)]
    assert whole_steps == list(range(1, len(whole_steps) + 1)) and kept
    metrics = Metrics(disk, config, resume_step=1)
    metrics.log(2, {"loss/total": 0.25})
    assert [(r["step"], r["loss/total"]) for r in read_history(disk)] == [(1, 0.5), (2, 0.25)]


def test_while_weights_are_exported(disk, tmp_path, told):
    """The export of before stays, and what there is of the new one goes: it would keep the disk full."""
    model = saved_model(tmp_path / "base")
    (tmp_path / "base/notes.txt").write_text("x" * 300_000)
    config = configure(tmp_path)
    found = checkpointed(dict(model.named_parameters()), config, told).find()
    export_hf(found, disk / "hf", tmp_path / "base")
    before = {path.name: path.read_bytes() for path in (disk / "hf").iterdir()}

    for left in (30_000, 310_000):  # full while the model's own files are copied, and at the weights
        filler = fill(disk)
        with filler.open("r+b") as file:
            file.truncate(filler.stat().st_size - left)
        with pytest.raises(OSError) as error:
            export_hf(found, disk / "hf", tmp_path / "base", "fp32")
        told_in_a_line(error.value)
        assert {path.name: path.read_bytes() for path in (disk / "hf").iterdir()} == before
        assert not list(disk.glob(".hf*")), left
        filler.unlink()
    out = export_hf(found, disk / "hf", tmp_path / "base", "fp32")
    written = load_file(out / "model.safetensors")
    assert torch.equal(written["model.norm.weight"], model.model.norm.weight)


def test_while_the_model_is_downloaded(disk, monkeypatch):
    config = RunConfig(model=Model(path="owner/model"))
    with hub_server.serve() as served:
        served.add("owner/model", {hub.WHOLE: b"w" * (2 * DISK_BYTES)})
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        with pytest.raises(Exception) as error:
            hub.fetch_files(config, [hub.WHOLE], disk)
        told_in_a_line(error.value)
        served.add("owner/model", {hub.WHOLE: b"w" * 2000})
        for left in disk.rglob("*.incomplete"):
            left.unlink()
        assert hub.fetch_files(config, [hub.WHOLE], disk)[0].read_bytes() == b"w" * 2000


def test_a_disk_that_turns_read_only(disk, tmp_path, told):
    """As the kernel makes one that has failed: what was committed is read, and the same line and code."""
    config = override(configure(tmp_path), ["logging.tensorboard=false"])
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    save(checkpoints, ranks, 2)
    metrics, phases = Metrics(disk, config), Phases(disk)
    metrics.log(1, {"loss/total": 0.5})
    read_only(disk)
    for write in (lambda: metrics.log(2, {"loss/total": 0.5}), lambda: phases.begin(2)):
        with pytest.raises(OSError) as error:
            write()
        told_in_a_line(error.value, "Read-only file system")
    assert holds(again(config, told).find(), 2)
    read_only(disk, False)
    save(checkpoints, ranks, 4)
    assert checkpoints.progress.safe == 4


@pytest.mark.long
def test_a_run_on_a_full_disk_ends_by_one_line_and_goes_on_where_there_is_room(tmp_path):
    """A whole job; its ranks pretend to train."""
    with small_disk(tmp_path / "disk", 512 << 20) as disk:
        config = drill.configure(tmp_path, 10**6, 2, standin=True)
        checkpoint = replace(config.checkpoint, every_steps=2, remote="", export_hf="never")
        config = replace(config, run=replace(config.run, dir=str(disk / "run")), checkpoint=checkpoint)
        job = Job(config, tmp_path / "job", {"STANDIN_STEP_S": "0.4"}, "tests.loops.standin").start()
        try:
            job.until(lambda: job.in_phase("grade", 8), 200)
            filler = fill(disk)
            began = time.monotonic()
            assert job.wait(100) == EXIT_STORAGE
            print(f"full disk: the job ended after {time.monotonic() - began:.1f} s")
            said = job.tail()
            assert said.count("error: ") == 1 and "No space left on device" in said.splitlines()[-1], said
            assert "Traceback" not in said
            committed = newest_step(config, None)
            filler.unlink()
            job.start()
            job.until(lambda: f"resumed from step {committed}" in job.tail(), 200)
            job.until(lambda: newest_step(config, None) > committed, 200)
        finally:
            job.kill()
    assert committed >= 4
