"""TensorBoard and W&B, offline and cut off."""

import json
import os
import shutil
import signal
import struct
import time
from pathlib import Path

import pytest
from written_run import run_script, write_run

from trainer.config import ConfigError, RunConfig, override
from trainer.observe.history import read_history

ROOT = Path(__file__).parents[2]
PLAIN = override(RunConfig(), ["logging.tensorboard=false"])


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_run(tmp_path, 8, overrides=())
    with next((tmp_path / "tensorboard").iterdir()).open("ab") as file:
        file.write(b"\x20\x00\x00")  # what a kill leaves of a record
    time.sleep(1.1)  # event files are ordered by the second in their names
    write_run(tmp_path, 10, overrides=(), resume_step=5)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("reward/mean")
    assert [e.step for e in scalars] == list(range(1, 11))
    assert scalars[6].value == pytest.approx(read_history(tmp_path)[7]["reward/mean"])


WANDB_RUN = """
    import os, signal, sys
    sys.path.insert(0, "tests/observe")
    from pathlib import Path
    from written_run import write_run, picture
    from trainer.config import RunConfig, override
    from trainer.observe.metrics import Metrics
    run_dir, steps, resume_step, end = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    options = ("run.name=team/run 1", "logging.wandb=offline", "logging.tensorboard=false")
    if end == "kill":
        metrics = Metrics(run_dir, override(RunConfig(), list(options)), resume_step)
        metrics.log(1, {"reward/mean": 1.0})
        os.kill(os.getpid(), signal.SIGKILL)
    write_run(run_dir, steps, overrides=options, resume_step=resume_step)
"""


def wandb_history(directory: Path) -> dict[int, dict]:
    """Steps in the .wandb file of one attempt, as `wandb sync` would upload them."""
    from wandb.proto.wandb_internal_pb2 import Record  # ty: ignore[unresolved-import]

    steps: dict[int, dict] = {}
    for data in log_records(next(directory.glob("*.wandb")).read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            steps.setdefault(int(items["_step"]), {}).update(items)
    return steps


def log_records(data: bytes, block: int = 32768):
    """Records of a LevelDB log after W&B's header of 7 bytes; each part: crc32 [4], length [2], type [1],
    bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_offline_needs_no_network_and_its_newest_attempt_holds_the_whole_run(tmp_path):
    prefix = ("unshare", "--net") if shutil.which("unshare") and os.geteuid() == 0 else ()
    for steps, resume_step in ((7, 0), (9, 5)):
        began = time.monotonic()
        done = run_script(WANDB_RUN, str(tmp_path), str(steps), str(resume_step), "", prefix=prefix)
        assert done.returncode == 0, done.stderr
        assert time.monotonic() - began < 60
    attempts = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(attempts) == 2 and all(a.name.endswith("-team-run-1") for a in attempts)
    history = wandb_history(attempts[-1])
    assert sorted(history) == list(range(10))
    assert history[3]["reward/mean"] == read_history(tmp_path)[3]["reward/mean"]
    assert history[0]["eval/accuracy"] == 0.21
    assert list((attempts[0] / "files/media").rglob("*.png")), "the samples' pictures are there"


def test_wandb_leaves_no_process_behind_when_the_trainer_is_killed(tmp_path):
    assert run_script(WANDB_RUN, str(tmp_path), "1", "0", "kill").returncode == -signal.SIGKILL
    deadline = time.time() + 20
    while left := processes_with(str(tmp_path).encode()):
        assert time.time() < deadline, f"still running: {left}"
        time.sleep(0.2)


def processes_with(text: bytes) -> list[int]:
    """Other processes that hold a file under a directory open, or name it on their command line."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        if int(proc.name) == os.getpid():
            continue
        try:
            files = [os.readlink(f).encode() for f in (proc / "fd").iterdir()]
            if text in (proc / "cmdline").read_bytes() or any(text in f for f in files):
                found.append(int(proc.name))
        except OSError:
            continue
    return found


def test_wandb_online_without_an_account_is_a_one_line_error(tmp_path):
    body = """
        import sys
        from trainer.config import RunConfig, override
        from trainer.observe.metrics import Metrics
        Metrics(sys.argv[1], override(RunConfig(), ["logging.wandb=online"]))
    """
    done = run_script(body, str(tmp_path), env={"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("set WANDB_API_KEY or logging.wandb=offline")
    assert ConfigError.__name__ in done.stderr
