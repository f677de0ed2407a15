"""Saving beside training: two commits, a store that is away, retention, the disk budget, the interval,
SIGKILL."""

import contextlib
import ctypes
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from tests import servers
from tests.checkpoint.synthetic import (
    SHAPES,
    again,
    attempt,
    configure,
    cut,
    finish,
    holds,
    place,
    resend,
    save,
    steps_in,
    whole,
    writers,
)
from trainer.checkpoint import staging
from trainer.checkpoint.attempt import Attempts
from trainer.checkpoint.format import CheckpointError, Shard
from trainer.checkpoint.layout import step_name
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.place import Keep, steps_to_keep
from trainer.checkpoint.writer import ShardWriter
from trainer.config import override
from trainer.storage.storage import Storage
from trainer.storage.stores import RetryPolicy
from trainer.system.errors import StorageError

QUICK = RetryPolicy(attempts=2, first_wait_s=0.1, max_wait_s=0.2, request_retries=0, request_retry_s=1.0)


@pytest.fixture
def held(tmp_path):
    """An attempt whose record no store can hold up."""
    return Attempts(Storage(tmp_path / "attempts")).take(0)


# --- retention and budget -----------------------------------------------------------------------------------


def test_keeps_the_last_and_the_best_local_and_remote_apart(tmp_path, told):
    config = configure(
        tmp_path, "checkpoint.keep_last=1", "checkpoint.keep_last_remote=3", "checkpoint.keep_best=1"
    )
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    for step, score in ((2, 0.1), (4, 0.9), (6, 0.3), (8, None), (10, 0.2)):
        save(checkpoints, ranks, step, score=score)
    assert steps_in(tmp_path / "run/checkpoints") == [4, 10]
    assert steps_in(tmp_path / "remote/test/checkpoints") == [4, 6, 8, 10]
    left = [p.name for p in (tmp_path / "remote/test/checkpoints").iterdir()]
    assert sorted(left) == [step_name(step) for step in (4, 6, 8, 10)], "nothing of the others is left"


def test_old_ones_stay_until_the_store_has_the_new_one(tmp_path, held, told, monkeypatch):
    """While the store is away the disk continues committing, and holds no more than it must."""
    config = configure(tmp_path, "checkpoint.keep_last=1", "checkpoint.keep_last_remote=1")
    config = override(config, ["checkpoint.remote=s3://bucket/x"])
    with servers.rclone(tmp_path / "disk") as server:
        store = Storage("s3://bucket/x/test/checkpoints", env=server.env, retry=QUICK)
        checkpoints = Checkpoints(config, "data", attempt=held, storage=store, say=told.append)
        ranks = writers(config, 1, storage=store)
        save(checkpoints, ranks, 2)
        server.kill()
        save(checkpoints, ranks, 4)
        assert steps_in(tmp_path / "run/checkpoints") == [2, 4]
        progress = checkpoints.progress
        assert (checkpoints.progress.failures, progress.committed, progress.safe) == (1, 4, 2)
        assert any("committed locally only" in text for text in told)
        assert not checkpoints.due(5, 1.0), "what is whole on the disk need not be written again"
        save(checkpoints, ranks, 6)
        assert steps_in(tmp_path / "run/checkpoints") == [2, 6]
        server.start()
        assert resend(checkpoints, ranks) == 6
        assert steps_in(tmp_path / "run/checkpoints") == [6]
        assert {key.split("/")[0] for key, _ in store.list()} == {"step-00000006"}
        assert (checkpoints.progress.failures_in_a_row, checkpoints.progress.safe) == (0, 6)
        assert resend(checkpoints, ranks) is None
        shutil.rmtree(tmp_path / "run")
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        assert holds(again(config, told).find(), 6)


def test_three_failures_in_a_row_stop_the_run(tmp_path, held, told):
    config = override(configure(tmp_path), ["checkpoint.remote=s3://bucket/x"])
    gone = Storage("s3://bucket/x", env=servers.s3_environment(servers.free_port()), retry=QUICK)
    checkpoints = Checkpoints(config, "data", attempt=held, storage=gone, say=told.append)
    ranks = writers(config, 1, storage=gone)
    save(checkpoints, ranks, 2)
    assert resend(checkpoints, ranks) == 2
    with pytest.raises(StorageError, match="3 checkpoints in a row"):
        save(checkpoints, ranks, 4)
    found = Checkpoints(config, "data", attempt=held, storage=gone, say=told.append).find()
    assert found and found.step == 4, "the local ones are whole"
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StorageError):
        Checkpoints(config, "data", attempt=held, storage=gone, say=told.append).find()


def test_a_file_that_the_store_lost_is_sent_again_before_the_commit(run, tmp_path, told):
    _, checkpoints, ranks = run
    checkpoints.begin(2, {"step": 2})
    for writer in ranks:
        writer.start(2, cut(whole(2), writer.rank, 2), {}, attempt=checkpoints.attempt)
        writer.wait()
    there = place(tmp_path / "remote/test/checkpoints", 2)
    (there / "rank-00001-of-00002.json").write_text("cut off")
    finish(checkpoints, ranks)
    assert (checkpoints.progress.failures, checkpoints.progress.safe) == (1, 0)
    assert any("rank-00001-of-00002.json is not whole in the store" in text for text in told)
    assert not (there / "manifest.json").exists()
    assert resend(checkpoints, ranks) == 2
    assert checkpoints.progress.safe == 2
    assert (there / "manifest.json").exists()


@pytest.mark.parametrize(
    ("steps", "keep", "safe", "kept"),
    [
        ((2, 4, 6), Keep(2, 0), 6, {4, 6}),
        ((2, 4, 6), Keep(2, 0), 4, {2, 4, 6}),  # 6 is not yet in the store
        ((2, 4, 6, 8, 10), Keep(2, 0), 4, {2, 4, 8, 10}),  # nor are 8 and 10; 6 is behind
        ((2, 4), Keep(1, 0), 0, {4}),
        ((2, 4, 6, 8, 10), Keep(1, 0, good=2, trouble=7), 10, {4, 6, 10}),  # from before the trouble
        ((2, 4, 6, 8, 10), Keep(1, 0, good=2, trouble=6), 10, {2, 4, 10}),  # 6 is of the step with the alarm
        ((2, 4, 6, 8, 10), Keep(1, 0, good=2), 10, {10}),
        ((2, 4, 6, 8, 10), Keep(1, 0, good=0, trouble=7), 10, {10}),
        ((2, 4, 6), Keep(1, 1), 6, {2, 6}),  # the best, by its score
    ],
)
def test_what_is_kept(steps, keep, safe, kept):
    manifests = {step: {"step": step, "score": 0.9 if step == 2 and keep.best else None} for step in steps}
    assert steps_to_keep(manifests, keep, safe) == kept


def test_disk_budget_drops_old_ones_early_then_refuses_before_writing(tmp_path, told):
    size = sum(3 * 4 * torch.Size(shape).numel() for shape in SHAPES.values())
    config = configure(tmp_path, "checkpoint.keep_last=3", f"checkpoint.max_disk_gib={3.6 * size / 2**30}")
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    for step in (2, 4, 6):
        save(checkpoints, ranks, step)
    assert any("dropping the local checkpoint of step 2 early" in text for text in told)
    assert steps_in(tmp_path / "run/checkpoints") == [4, 6]
    tight = override(config, [f"checkpoint.max_disk_gib={1.5 * size / 2**30}"])
    checkpoints, ranks = attempt(tight, told), writers(tight, 1)
    checkpoints.find()
    with pytest.raises(CheckpointError, match=r"no room .* raise checkpoint\.max_disk_gib"):
        save(checkpoints, ranks, 8)
    assert not list((tmp_path / "run/checkpoints").glob("step-00000008/rank*"))
    assert steps_in(tmp_path / "run/checkpoints") == [6], "the newest one stays"


def test_full_disk_is_reported_and_nothing_half_written_is_left(tmp_path, told, monkeypatch):
    """A file size limit of the process stands for the full disk: write() fails half way, for real."""
    code = f"""
import resource, signal, sys
sys.path[:0] = [{os.getcwd()!r}]
from tests.checkpoint.synthetic import *
from trainer.checkpoint.format import CheckpointError
config = configure({str(tmp_path)!r})
checkpoints, ranks = attempt(config, []), writers(config, 1)
save(checkpoints, ranks, 2)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
try:
    save(checkpoints, ranks, 4)
except CheckpointError as error:
    print(error)
    checkpoints.failed(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert not list((checkpoints.folder / "step-00000004").iterdir())
assert checkpoints.due(5, 1.0)
save(checkpoints, ranks, 5)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    assert "rank 0 could not write its checkpoint" in result.stdout
    found = again(configure(tmp_path), told).find()
    assert found.step == 5
    assert holds(found, 5)


# --- asynchronous -------------------------------------------------------------------------------------------


def test_training_goes_on_while_it_is_written(tmp_path, held, told):
    """The values of the step are saved, though `host` copies are followed by in-place updates at once."""
    config = override(configure(tmp_path), ["checkpoint.remote=s3://bucket/x"])
    with servers.rclone(tmp_path / "disk") as server, servers.proxy(server.port) as relay:
        relay.bytes_per_s = 10e3
        env = servers.s3_environment(relay.port)
        store = Storage("s3://bucket/x/test/checkpoints", env=env)
        checkpoints = Checkpoints(config, "data", attempt=held, storage=store, say=told.append)
        (writer,) = writers(config, 1, storage=store)
        device = whole(2)
        begun = time.monotonic()
        checkpoints.begin(2, {})
        shards = {
            name: Shard(
                shape, 0, t["master"].numel(), {kind: writer.host(f"{kind}/{name}", t[kind]) for kind in t}
            )
            for name, shape in SHAPES.items()
            for t in [device[name]]
        }
        writer.start(2, shards, {}, send=checkpoints.sends, attempt=held.name)
        for tensors in device.values():
            for tensor in tensors.values():
                tensor.zero_()
        stall = time.monotonic() - begun
        assert not checkpoints.due(4, 1.0), "one is written at a time"
        while checkpoints.progress.writing:
            checkpoints.advance([writer.status()])
        local_s = time.monotonic() - begun
        progress = checkpoints.progress
        assert (progress.committed, progress.safe, progress.uploading) == (2, 0, 2)
        assert holds(again(config_without_store(config), told).find(), 2), "committed here before it is there"
        finish(checkpoints, [writer])
        assert stall < checkpoints.schedule.save_s / 4
        assert local_s < checkpoints.schedule.save_s / 2, "what the disk takes does not wait for the store"
        assert checkpoints.progress.safe == 2
        assert checkpoints.due(4, 1.0)
        assert holds(checkpoints.find(), 2)


def config_without_store(config):
    return override(config, ["checkpoint.remote="])


def test_the_next_one_is_written_while_one_is_uploaded(tmp_path, held, told, monkeypatch):
    """A slow store delays its own commits, never those on the disk; what it takes next is the newest."""
    config = override(configure(tmp_path, "checkpoint.keep_last=1"), ["checkpoint.remote=s3://bucket/x"])
    with servers.rclone(tmp_path / "disk") as server, servers.proxy(server.port) as relay:
        env = servers.s3_environment(relay.port)
        store = Storage("s3://bucket/x/test/checkpoints", env=env)
        checkpoints = Checkpoints(config, "data", attempt=held, storage=store, say=told.append)
        ranks = writers(config, 2, storage=store)
        relay.stall()
        for step in (2, 4, 6):
            assert checkpoints.due(step, 1.0)
            checkpoints.begin(step, {"step": step})
            assert checkpoints.sends == (step == 2)
            for writer in ranks:
                shards = cut(whole(step), writer.rank, 2)
                writer.start(
                    step, shards, {}, checkpoints.retention.local_steps(), checkpoints.sends, held.name
                )
            while checkpoints.progress.writing:
                checkpoints.advance([writer.status() for writer in ranks])
            progress = checkpoints.progress
            assert (progress.committed, progress.safe, progress.uploading) == (step, 0, 2)
        assert steps_in(tmp_path / "run/checkpoints") == [2, 6], "what is being uploaded, and the newest"
        relay.restore()
        finish(checkpoints, ranks)
        assert checkpoints.progress.safe == 2
        assert resend(checkpoints, ranks) == 6
        assert checkpoints.progress.safe == 6
        assert steps_in(tmp_path / "run/checkpoints") == [6]
        shutil.rmtree(tmp_path / "run")
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        assert holds(again(config, told).find(), 6)


def test_staging_takes_the_bytes_that_it_holds(run, monkeypatch):
    """torch's pinned memory comes in powers of two: a tensor just above one would take twice its size."""
    pinned = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, **k: pinned.append(a) if k.get("pin_memory") else empty(*a, **k)
    )
    writer = ShardWriter(run[0], 0, 1)
    sizes = [2**20 + 1, 3 * 2**18, 17]
    for number, size in enumerate(sizes):
        writer.host(f"master/{number}", torch.zeros(size))
        writer.host(f"exp_avg/{number}", torch.zeros(size))
    assert writer._memory.nbytes == 2 * 4 * sum(sizes) and not pinned


class Driver:
    """CUDA's, as far as pages are locked: says what is done to which memory, which must still be there."""

    def __init__(self, monkeypatch):
        self.said, self._gpu = [], []
        self.answer = 0
        monkeypatch.setattr(torch.cuda, "device", self._device)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)

    @contextlib.contextmanager
    def _device(self, chosen):
        self._gpu.append(chosen)
        yield
        self._gpu.pop()

    def cudaHostRegister(self, address, size, flags):
        self.said.append(("locked", address, size, self._gpu[-1], threading.current_thread().name[:5]))
        return self.answer

    def cudaHostUnregister(self, address):
        ctypes.string_at(address, 1)  # ends the process where the memory is gone
        self.said.append(("unlocked", address))
        return 0


def test_pages_are_locked_behind_the_first_save_and_once(run, monkeypatch):
    """Locking takes longer than the copy: training does not wait for it. Each rank's own GPU does it: a
    thread without it would make a context on the machine's first one."""
    driver, mine = Driver(monkeypatch), torch.device("cuda", 5)
    writer = ShardWriter(run[0], 0, 1)
    large = torch.zeros(staging.LARGE // 4)
    for step in (2, 4):
        writer._memory.like("master/a", large, mine)  # as if it lay on the GPU
        copy = writer.host("master/a", large.fill_(step))
        assert len(driver.said) == (1 if step > 2 else 0), (
            "no page is locked while training waits for its copy"
        )
        small = writer.host("master/b", torch.full((4,), float(step)))
        shards = {
            "a": Shard(large.shape, 0, len(large), {"master": copy}),
            "b": Shard((4,), 0, 4, {"master": small}),
        }
        writer.start(step, shards, {})
        writer.wait()
    assert driver.said == [("locked", copy.data_ptr(), copy.nbytes, mine, "pages")]


def test_locked_memory_is_unlocked_before_it_is_given_back_and_not_while_it_is_used(monkeypatch):
    driver = Driver(monkeypatch)
    memory = staging.HostMemory()
    held = memory.like("a", torch.zeros(staging.LARGE // 4), torch.device("cuda", 0))
    memory.lock_behind()
    other = memory.like("a", torch.zeros(staging.LARGE // 2), torch.device("cuda", 0))  # another shape
    view, address = held[7:9], held.data_ptr()
    assert other.data_ptr() != address
    del held
    assert [what for what, *_ in driver.said] == ["locked"] and view.sum() == 0
    del view
    assert driver.said[1:] == [("unlocked", address)]
    memory.lock_behind()
    del other, memory
    deadline = time.monotonic() + 20
    while len(driver.said) < 4 and time.monotonic() < deadline:  # its thread may only now come to it
        gc.collect()
        time.sleep(0.01)
    assert [what for what, *_ in driver.said] == ["locked", "unlocked"] * 2


def test_memory_that_the_driver_does_not_lock_is_used_as_it_is(monkeypatch, capsys):
    driver = Driver(monkeypatch)
    driver.answer = 2  # out of memory
    memory = staging.HostMemory()
    for key in "ab":
        memory.like(key, torch.zeros(staging.LARGE // 4), torch.device("cuda", 0))
    memory.lock_behind()
    assert memory.like("b", torch.zeros(staging.LARGE // 4)).sum() == 0
    del memory
    gc.collect()
    assert len(driver.said) == 2, "nothing is unlocked that was not locked"
    assert capsys.readouterr().out.count("warning: the driver does not lock host memory") == 1


def test_the_writer_keeps_its_host_buffers(run):
    _, _, (writer, _) = run
    first = writer.host("a", torch.ones(4, 2))
    second = writer.host("a", torch.zeros(4, 2))
    assert first.data_ptr() == second.data_ptr()
    assert first.shape == (8,)
    assert torch.equal(second, torch.zeros(8))


def test_shards_that_do_not_fit_their_place_are_refused(run):
    _, checkpoints, (writer, _) = run
    writer.start(2, {"a": Shard((4,), 0, 2, {"master": torch.zeros(3)})}, {})
    with pytest.raises(CheckpointError, match="master/a: 3 elements"):
        writer.wait()


# --- when ---------------------------------------------------------------------------------------------------


def test_due_every_n_steps_and_at_the_end(tmp_path, told):
    config = configure(tmp_path, "checkpoint.every_steps=3")
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    saved = []
    for step in range(1, 9):
        if checkpoints.due(step, 1.0, last=step == 8):
            save(checkpoints, ranks, step)
            saved.append(step)
    assert saved == [3, 6, 8]
    resumed = again(config, told)
    assert resumed.find().step == 8
    assert [step for step in (9, 10) if resumed.due(step, 1.0)] == [9]


def test_interval_by_daly_is_measured_and_told(tmp_path, told):
    config = configure(
        tmp_path, "checkpoint.every_steps=0", "checkpoint.mean_time_between_preemptions_s=3600"
    )
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    assert checkpoints.due(1, 10.0), "the first step is saved, to measure"
    save(checkpoints, ranks, 1)
    checkpoints.schedule.stall_s = 5.0
    due = [step for step in range(2, 40) if checkpoints.due(step, 10.0)]
    assert due[0] == 19, "sqrt(2 * 5 * 3600) = 190 s, less the stall: 18 or 19 steps of 10 s"
    assert any("saving every" in text and "one preemption in 3600 s" in text for text in told)
    assert checkpoints.metrics()["perf/checkpoint_interval_steps"] == checkpoints.schedule.interval_steps


def test_whether_a_save_fits_the_notice(run):
    _, checkpoints, ranks = run
    assert checkpoints.fits(1.0), "what has not been measured is tried"
    assert not checkpoints.fits(0.0)
    save(checkpoints, ranks, 2)
    assert checkpoints.fits(30.0)
    checkpoints.schedule.write_s = 20.0
    assert checkpoints.fits(30.0)
    checkpoints.begin(4, {})
    assert not checkpoints.fits(30.0), "the one under way comes first"
    checkpoints.failed("given up")
    checkpoints.schedule.write_s = 40.0
    assert not checkpoints.fits(30.0)


# --- killed -------------------------------------------------------------------------------------------------

KILLED = """
import sys
sys.path[:0] = [{root!r}]
from tests.checkpoint.synthetic import *
config = override(configure({folder!r}), ["checkpoint.remote=s3://bucket/x", "checkpoint.max_losses=100"])
checkpoints = attempt(config, [])
found = checkpoints.find()
step = found.step if found else 0
assert found is None or holds(found, step), "wrong values after a kill"
print("resumed", step, flush=True)
ranks = writers(config, 2)
while step < 60:
    step += 2
    save(checkpoints, ranks, step)
    print("saved" if checkpoints.progress.stored == step else "the store lacks", step, flush=True)
"""


@pytest.mark.slow
def test_sigkill_at_any_moment_never_loses_a_committed_checkpoint(tmp_path, told):
    """Kills the writer at random moments; what a fresh process finds is whole and never older than what was
    told."""
    chance = random.Random(0)
    told_step = 0
    resumed = []
    with servers.rclone(tmp_path / "disk") as server:
        for _ in range(8):
            process = subprocess.Popen(
                [sys.executable, "-c", KILLED.format(root=os.getcwd(), folder=str(tmp_path))],
                env=os.environ | server.env,
                stdout=subprocess.PIPE,
                text=True,
            )
            lines: list[str] = []
            reader = threading.Thread(target=lambda p=process, out=lines: out.extend(p.stdout))
            reader.start()
            while not lines and process.poll() is None:
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.6))
            process.send_signal(signal.SIGKILL)
            process.wait()
            reader.join()
            assert lines and lines[0].startswith("resumed"), "it failed before it was killed"
            resumed.append(int(lines[0].split()[1]))
            assert resumed[-1] >= told_step
            told_step = max(
                [told_step, *(int(line.split()[1]) for line in lines if not line.startswith("the store"))]
            )
            if chance.random() < 0.5:
                shutil.rmtree(tmp_path / "run", ignore_errors=True)  # the replacement is a fresh node
    assert told_step > 6
    assert len(set(resumed)) > 3
