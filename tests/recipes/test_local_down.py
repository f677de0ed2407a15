"""`down` of a run on this machine ends it, whether it was started with --detach or not."""

import os
import subprocess
import time

import pytest

from recipes.drivers import platforms
from recipes.records import run_record
from trainer.system import processes


@pytest.fixture
def start(tmp_path):
    """Starts a run's commands with a task file that waits; returns them with the process."""
    folder = tmp_path / "runs/mine/task"
    folder.mkdir(parents=True)
    (folder / "demo.sh").write_text("exec sleep 300\n")
    record = run_record.RunRecord(run_id="mine", recipe="demo", target="local")
    started = []

    def run(detach):
        commands = platforms.launch_commands(
            record, ["runs/mine/task/demo.sh"], {"RUN_ID": "mine"}, [], detach
        )
        (up,) = commands.up
        started.append(subprocess.Popen(up, cwd=tmp_path, env=os.environ | {"RUN_ID": "mine"}))
        file = tmp_path / f"runs/mine/local.{'pgid' if detach else 'pid'}"
        end = time.monotonic() + 10
        while not (file.exists() and file.read_text().strip()):
            assert time.monotonic() < end
            time.sleep(0.02)
        return commands, int(file.read_text())

    yield run
    for process in started:
        process.kill()
        process.wait()


def down(commands, folder):
    (words,) = commands.down
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("detach", [False, True])
def test_it_ends(start, tmp_path, detach):
    commands, pid = start(detach)
    end = time.monotonic() + 10
    while "sleep" not in (tmp_path / f"/proc/{pid}/comm").read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert down(commands, tmp_path).returncode == 0
    while not processes.has_ended(pid):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_process_that_has_its_number_by_now_is_left_alone(start, tmp_path):
    commands, _ = start(False)
    other = subprocess.Popen(["sleep", "300"], env={"RUN_ID": "another"})
    try:
        (tmp_path / "runs/mine/local.pid").write_text(f"{other.pid}\n")
        done = down(commands, tmp_path)
        assert "no process of mine is left" in done.stderr and other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("file", ["local.pid", "local.pgid"])
def test_of_a_run_that_has_ended_it_says_that_and_nothing_else(tmp_path, file):
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine" / file).write_text("4194303")  # no such process
    record = run_record.RunRecord(run_id="mine", recipe="demo", target="local")
    done = down(platforms.launch_commands(record, ["demo.sh"], {"RUN_ID": "mine"}, [], False), tmp_path)
    assert done.stderr == "no process of mine is left\n" and not done.stdout and done.returncode == 0
