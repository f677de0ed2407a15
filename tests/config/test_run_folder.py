"""A run's folder as other processes read it: torn lines, and a process that was killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from trainer.config import run_folder
from trainer.config.growing_file import GrowingFile

WRITER = """
import sys, time
from trainer.observe.phases import Phases
phases = Phases(sys.argv[1])
with phases("update"):
    print("there", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path):
    """A process that says in tmp_path that it is running."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"there\n"
    yield process
    process.kill()
    process.wait()


def test_a_run_whose_process_was_killed_is_not_running(writer, tmp_path):
    assert run_folder.read_progress(tmp_path)["status"] == "running"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert run_folder.read_progress(tmp_path)["status"] == "died"
    assert json.loads((tmp_path / "progress.json").read_text())["status"] == "running", "nobody wrote it"


def test_a_process_that_got_the_same_id_is_not_taken_for_it(writer, tmp_path):
    progress = json.loads((tmp_path / "progress.json").read_text())
    (tmp_path / "progress.json").write_text(
        json.dumps(progress | {"pid_started": progress["pid_started"] - 1})
    )
    assert run_folder.read_progress(tmp_path)["status"] == "died"


@pytest.mark.parametrize("change", [{"pid_space": "another machine"}, {"status": "finished"}])
def test_a_process_of_another_machine_is_not_looked_for(writer, tmp_path, change):
    progress = json.loads((tmp_path / "progress.json").read_text())
    (tmp_path / "progress.json").write_text(json.dumps(progress | {"pid": 1} | change))
    assert run_folder.read_progress(tmp_path)["status"] == change.get("status", "running")


def test_torn_lines_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rew\n[3]\n{"step": 4}\n{"step": 5, "x"')
    assert [line["step"] for line in run_folder.read_lines(path)] == [1, 4]
    assert [line["step"] for line in run_folder.newest_lines(path)] == [1, 4]
    assert run_folder.read_lines(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("content", ["", "{", "[1]", "null"])
def test_progress_that_is_no_record(tmp_path, content):
    (tmp_path / "progress.json").write_text(content)
    assert run_folder.read_progress(tmp_path) == {}


def test_complete_lines_come_once(tmp_path):
    path = tmp_path / "file"
    growing = GrowingFile(path)
    assert growing.read() == b""
    path.write_bytes(b"one\ntw")
    assert growing.read() == b"one\n" and growing.read() == b""
    with path.open("ab") as file:
        file.write(b"o\nthree\nfo")
    assert growing.read() == b"two\nthree\n" and not growing.begun_anew
    assert growing.rest() == b"fo" and growing.rest() == b"" and growing.read() == b""


def test_a_file_that_is_written_anew_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\n")
    growing = GrowingFile(path)
    growing.read()
    other = tmp_path / "other"
    other.write_bytes(b"one\nthree and more\n")  # not shorter, but another file
    other.replace(path)
    assert growing.read() == b"one\nthree and more\n" and growing.begun_anew
    path.write_bytes(b"x\n")
    assert growing.read() == b"x\n" and growing.begun_anew
    assert growing.read() == b"" and not growing.begun_anew


def test_what_was_there_before_can_be_passed_over(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"earlier\n")
    growing = GrowingFile(path, start=8)
    with path.open("ab") as file:
        file.write(b"new\n")
    assert growing.read() == b"new\n"
