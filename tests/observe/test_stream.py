"""What a run pushes to its bucket while it runs, and what a desk makes of it: in a store that is a folder."""

from __future__ import annotations

import json
import os
import random
import shutil
import time

import pytest
from written_run import sample, values, write_run

from trainer.checkpoint.attempt import Attempts
from trainer.config import ConfigError, RunConfig, override
from trainer.config.run_folder import read_lines, read_progress
from trainer.observe import mirror as mirroring
from trainer.observe import stream as streaming
from trainer.observe.history import read_history
from trainer.observe.metrics import Metrics
from trainer.observe.mirror import RunMirror
from trainer.observe.node_monitor import append_sample
from trainer.observe.phases import Phases
from trainer.observe.stream import Stream
from trainer.storage import attempt_record
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError

PLAIN = override(RunConfig(), ["logging.tensorboard=false"])
NEVER_S = 3600.0


class Run:
    """One machine after another writes a run; the desk looks at it."""

    def __init__(self, tmp_path):
        self.url = str(tmp_path / "bucket" / "mine")
        self.tmp_path = tmp_path
        self.machines = 0
        self.storage = Storage(self.url)
        self.attempts = Attempts(Storage(f"{self.url}/attempts"))
        self.desk = RunMirror(self.url, tmp_path / "desk")

    def start(self, committed=0):
        self.machines += 1
        self.dir = self.tmp_path / f"machine-{self.machines}"
        self.dir.mkdir(exist_ok=True)
        self.attempt = self.attempts.take(committed, "launch")
        self.stream = Stream(self.dir, self.storage, self.attempt.name, NEVER_S, lambda: False)
        return self.stream

    def log(self, text):
        with (self.dir / "launch.log").open("a") as file:
            file.write(text)

    def same(self, *names):
        for name in names:
            assert (self.desk.folder / name).read_bytes() == (self.dir / name).read_bytes(), name


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_a_desk_sees_steps_samples_images_and_the_log_as_they_are_written(run):
    stream = run.start()
    metrics, phases = Metrics(run.dir, PLAIN), Phases(run.dir, total_steps=4)
    for step in (1, 2, 3):
        phases.begin(step)
        metrics.log(step, values(step, 4, random.Random(step)))
        metrics.samples(step, [sample(step, k, random.Random(k)) for k in range(4)])
        run.log(f"step {step}\n")
        stream.push()
        run.desk.update()
        run.same("metrics.jsonl", "samples.jsonl", "config.yaml", "progress.json", "attempts.jsonl")
        images = [name for r in read_lines(run.desk.folder / "samples.jsonl") for name in r["images"]]
        assert images and all((run.desk.folder / name).read_bytes() for name in images)
        assert (run.desk.folder / "launch.log").read_text().endswith(f"step {step}\n")


def test_a_file_lies_in_pieces_and_only_its_last_piece_is_ever_written_again(run, monkeypatch):
    monkeypatch.setattr(streaming, "PIECE_BYTES", 4096)
    stream, puts = run.start(), []
    put = run.storage.put_bytes
    monkeypatch.setattr(run.storage, "put_bytes", lambda key, data: (puts.append(key), put(key, data)))
    metrics = Metrics(run.dir, PLAIN)
    for step in range(1, 21):
        metrics.log(step, values(step, 20, random.Random(step)))
        stream.push()
    pieces = [key for key, _ in run.storage.list(f"{stream.prefix}/metrics.jsonl")]
    written = [key for key in puts if "metrics.jsonl" in key]
    assert len(pieces) >= 5 and written == sorted(written)
    assert all(size <= 4096 for _, size in run.storage.list(f"{stream.prefix}/metrics.jsonl"))
    run.desk.update()
    run.same("metrics.jsonl")
    del puts[:]
    stream.push()
    assert not puts, "nothing is new, so nothing is written"
    fetched = []
    get = run.desk.storage.get_bytes
    monkeypatch.setattr(run.desk.storage, "get_bytes", lambda key: (fetched.append(key), get(key))[1])
    metrics.log(21, values(21, 21, random.Random(21)))
    stream.push()
    run.desk.update()
    assert sum("metrics.jsonl" in key for key in fetched) <= 2, "pieces that are here are not fetched again"
    run.same("metrics.jsonl")


def test_a_resumed_run_on_a_new_machine_is_one_run_to_the_desk(run):
    run.start()
    write_run(run.dir, 8)
    run.log("first machine\n")
    history, first = (run.dir / "metrics.jsonl").read_bytes(), run.stream
    first.push()
    run.start(committed=5)
    run.desk.update()
    assert len(read_history(run.desk.folder)) == 9, "until the new machine has steps, the old one's are shown"
    metrics = Metrics(run.dir, PLAIN, 5, history)
    metrics.log(6, {"reward/mean": 0.75})
    run.log("second machine\n")
    append_sample(run.dir, {"node": 0, "unix_s": time.time(), "ranks": {}, "gpus": []})
    run.stream.push()
    run.desk.update()
    steps = read_history(run.desk.folder)
    assert [r["step"] for r in steps] == [0, 1, 2, 3, 4, 5, 6] and steps[-1]["reward/mean"] == 0.75
    assert [a["resume_step"] for a in read_lines(run.desk.folder / "attempts.jsonl")] == [0, 5]
    text = (run.desk.folder / "launch.log").read_text()
    assert text.index("--- attempt 1-") < text.index("first machine") < text.index("--- attempt 2-")
    assert text.index("--- attempt 2-") < text.index("second machine")


def test_on_the_same_disk_an_earlier_attempts_log_and_steps_are_not_pushed_twice(run):
    run.start()
    run.log("old\n")
    write_run(run.dir, 3)
    run.stream.push()
    past = time.time() - 60
    for path in run.dir.iterdir():
        if path.is_file():
            os.utime(path, (past, past))
    again = run.attempts.take(3, "launch")
    stream = Stream(run.dir, run.storage, again.name, NEVER_S, lambda: False)
    stream.push()
    assert run.storage.list(stream.prefix) == [], "nothing of the earlier attempt's"
    Metrics(run.dir, PLAIN, 2).log(3, {"reward/mean": 0.5})
    run.log("new\n")
    stream.push()
    run.desk.update()
    run.same("metrics.jsonl")
    assert (run.desk.folder / "launch.log").read_text().splitlines()[1::2] == ["old", "new"]


def test_a_store_that_fails_loses_nothing_and_stops_nothing(run, monkeypatch, capsys):
    stream = run.start()
    metrics = Metrics(run.dir, PLAIN)
    put, broken = run.storage.put_bytes, [True]

    def sometimes(key, data):
        if broken[0] and ("metrics" in key or "samples" in key):
            raise StorageError("503")
        put(key, data)

    monkeypatch.setattr(run.storage, "put_bytes", sometimes)
    for step in (1, 2):
        metrics.log(step, {"reward/mean": step / 10})
        metrics.samples(step, [sample(step, 0, random.Random(0))])
        with pytest.raises(StorageError):
            stream.push()
    broken[0] = False
    stream.push()
    run.desk.update()
    run.same("metrics.jsonl", "samples.jsonl")
    broken[0] = True
    metrics.log(3, {"reward/mean": 0.3})
    stream.close()
    assert "did not reach the bucket (1 times): 503" in capsys.readouterr().err


def test_a_flood_in_the_log_is_bounded_and_what_is_left_out_is_counted(run, monkeypatch):
    for name, value in (("PIECE_BYTES", 2000), ("BURST_BYTES", 10_000), ("LOG_PIECES", 12), ("LOG_HEAD", 3)):
        monkeypatch.setattr(streaming, name, value)
    stream = run.start()
    run.log("the first line\n")
    stream.push()
    for k in range(8):
        run.log("".join(f"line {k}.{i}\n" for i in range(4000)))
        stream.push()
    run.log("the last line\n")
    stream.push()
    pieces = run.storage.list(f"{stream.prefix}/launch.log")
    assert len(pieces) <= 12 + 6 and sum(size for _, size in pieces) < 40_000
    run.desk.update()
    text = (run.desk.folder / "launch.log").read_text()
    assert "the first line" in text and "bytes of the log are left out" in text
    assert text.endswith("the last line\n")
    assert json.loads((run.desk.folder / "left_out.json").read_text())["log_bytes"] > 200_000


def test_images_beyond_the_budget_are_counted_and_node_samples_thinned(run, monkeypatch):
    monkeypatch.setattr(streaming, "IMAGE_BYTES", 1500)
    stream = run.start()
    metrics = Metrics(run.dir, PLAIN)
    for step in (1, 2, 3):
        metrics.samples(step, [sample(step, k, random.Random(k)) for k in range(4)])
    for at in range(0, 300, 10):
        for node in (0, 1):
            append_sample(run.dir, {"node": node, "unix_s": 1000.0 + at, "ranks": {}, "gpus": []})
    stream.push()
    run.desk.update()
    assert json.loads((run.desk.folder / "left_out.json").read_text())["images"] > 0
    assert sum(size for key, size in run.storage.list(stream.prefix) if "/samples/" in key) <= 1500
    times = [r["unix_s"] for r in read_lines(run.desk.folder / "nodes.jsonl") if r["node"] == 1]
    assert times == [1000.0, 1060.0, 1120.0, 1180.0, 1240.0]


def test_torn_lines_end_no_stream_and_one_that_a_full_disk_cut_short_is_taken_back(run, monkeypatch):
    run.start()
    whole = json.dumps({"unix_s": time.time(), "node": 0}) + "\n"
    nodes = run.dir / "nodes.jsonl"
    nodes.write_text('{"unix_s": 1.5, "no' + whole + whole)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:9]))
    append_sample(run.dir, {"unix_s": 2.0, "node": 0})
    monkeypatch.undo()
    append_sample(run.dir, {"unix_s": 3.0, "node": 1})
    assert nodes.read_text().splitlines()[-2:] == [whole.rstrip(), '{"node": 1, "unix_s": 3.0}']
    write_run(run.dir, 1)
    with (run.dir / "samples.jsonl").open("a") as file:
        file.write('{"step": 1, "ima{"step": 2}\n')
    run.stream.push()
    run.desk.update()
    assert read_lines(run.desk.folder / "nodes.jsonl") == [json.loads(whole)]


def test_an_attempt_that_was_replaced_writes_nothing_more(run):
    run.start()
    stream = Stream(run.dir, run.storage, "1-fenced", 0.02, lambda: True)
    run.log("a line\n")
    time.sleep(0.2)
    stream.close()
    assert run.storage.list(stream.prefix) == []


def test_a_machine_that_vanished_is_not_shown_as_running(run, monkeypatch):
    run.start()
    Metrics(run.dir, PLAIN)
    Phases(run.dir)
    run.stream.push()
    assert run.desk.update().alive and read_progress(run.desk.folder).get("message") is None
    monkeypatch.setattr(attempt_record, "ALIVE_S", 0.0)
    newest = run.desk.update()
    assert not newest.alive and "has been silent since" in read_progress(run.desk.folder)["message"]
    assert read_progress(run.desk.folder)["status"] == "running", "its engine may start it again"
    run.attempts.close(run.attempt, 34, "node 1 is lost", 0)
    run.desk.update()
    assert "ended with 34 (node 1 is lost)" in read_progress(run.desk.folder)["message"]
    run.attempts.close(run.attempt, 2, "no such model", 0)
    newest = run.desk.update()
    assert newest.final and read_progress(run.desk.folder)["status"] == "failed"
    assert mirroring.run_has_ended(run.desk, newest)


def test_the_commands_of_the_desk(run, capsys):
    run.start()
    write_run(run.dir, 3)
    run.log("hello\n")
    run.stream.close()
    shutil.rmtree(run.dir)
    folder = run.tmp_path / "elsewhere"
    assert mirroring.main(["pull", run.url, str(folder), "--every", "0.1"]) == 0
    assert [r["step"] for r in read_history(folder)] == [0, 1, 2, 3]
    assert mirroring.main(["logs", run.url, str(folder), "--follow", "--every", "0.1"]) == 0
    assert capsys.readouterr().out.endswith("hello\n")
    assert mirroring.main(["pull", run.url, str(folder), "--weights"]) == 2
    assert "exported no weights" in capsys.readouterr().err
    Storage(f"{run.url}/checkpoints").put_bytes("hf/model.safetensors", b"weights")
    assert mirroring.main(["pull", run.url, str(folder), "--weights"]) == 0
    assert (folder / "hf/model.safetensors").read_bytes() == b"weights"
    with pytest.raises(ConfigError, match="no stream of a run"):
        RunMirror(str(run.tmp_path / "empty"), folder).update()
