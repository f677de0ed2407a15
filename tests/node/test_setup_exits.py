"""What runs before the node's own code: it is patient with a network that is away, and leaves with the
project's codes. The real scripts, with stand-ins for uv and for what they call."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep import commands
from data_prep.ingest import hub_files
from tests.small_disk import fill, read_only, small_disk
from trainer.storage.attempt_record import AttemptRecord
from trainer.storage.storage import Storage
from trainer.system.backoff import Backoff

ROOT = Path(__file__).parents[2]
AWAY = (
    "error: Failed to fetch: `https://index/simple/torch/`\n  Caused by: error sending request for url",
    "error: Request failed after 3 retries: operation timed out",
    "  Caused by: dns error: failed to lookup address information: Temporary failure in name resolution",
    "error: HTTP status server error (503 Service Unavailable) for url (https://index)",
    "  Caused by: HTTP status client error (429 Too Many Requests) for url",
    "error: Failed to download `torch`\n  Caused by: connection reset by peer",
)
WRONG = (
    "error: Hash mismatch for `obstore==0.9`: connection details follow",
    "  × No solution found when resolving dependencies",
    "error: HTTP status client error (404 Not Found) for url (https://index)",
)


@pytest.fixture
def checkout(tmp_path):
    """The scripts, and a uv that fails as often as the file `fails` has lines, with what `said` holds."""
    for name in ("setup.sh", "task.sh", "bucket.sh", "driver.sh", "counted.sh"):
        (tmp_path / "trainer/shell").mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "trainer/shell" / name, tmp_path / "trainer/shell" / name)
    (tmp_path / "requirements").mkdir()
    for name in ("cpu", "gpu", "test", "launch"):
        (tmp_path / f"requirements/{name}.txt").write_text("obstore==0.9\n")
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "uv").write_text(
        '#!/bin/bash\necho "$*" >> calls\n'
        'if [ -s fails ]; then sed -i 1d fails; cat said >&2; exit "$(cat code 2>/dev/null || echo 2)"; fi\n'
        'case "$1" in venv) p="${@: -1}"\n'
        '  [ ! -e "$p" ] || { echo "error: a directory already exists at $p" >&2; exit 2; }\n'
        '  mkdir -p "$p/bin"; touch "$p/bin/python"\n'
        '  chmod +x "$p/bin/python" ;; esac\n'
    )
    (bin / "uv").chmod(0o755)
    (bin / "sleep").write_text("#!/bin/bash\n")
    (bin / "sleep").chmod(0o755)
    return tmp_path


def shell(checkout, command, **more):
    env = os.environ | {"PATH": f"{checkout}/bin:{os.environ['PATH']}", "SPOTRL_IMAGE_DIR": "/nowhere"} | more
    done = subprocess.run(["bash", "-c", command], cwd=checkout, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("said", AWAY)
def test_set_up_waits_for_a_package_index_that_is_away(checkout, said):
    (checkout / "said").write_text(said + "\n")
    (checkout / "fails").write_text("x\n" * 4)
    code, out = shell(checkout, "bash trainer/shell/setup.sh desk")
    assert code == 0 and out.count("again in") == 4 and "environment desk is ready" in out
    shutil.rmtree(checkout / ".venvs")
    (checkout / "fails").write_text("x\n" * 99)
    code, out = shell(checkout, "bash trainer/shell/setup.sh desk", SPOTRL_SETUP_PATIENCE_S="3")
    assert code == 35 and out.strip().splitlines()[-1].startswith(
        "error: the network or the package index stays"
    )


@pytest.mark.parametrize("said", WRONG)
@pytest.mark.parametrize("uv_code", ["1", "2", "101"])
def test_what_no_retry_can_cure_ends_at_once(checkout, said, uv_code):
    (checkout / "said").write_text(said + "\n")
    (checkout / "code").write_text(uv_code)
    (checkout / "fails").write_text("x\n" * 9)
    code, out = shell(checkout, "bash trainer/shell/setup.sh desk")
    assert code == 2 and "again in" not in out and said.strip() in out


@pytest.mark.parametrize("python", [None, "gone", "another system's", "the image's"])
def test_a_folder_without_a_python_that_runs_is_made_anew(checkout, python):
    """Half of an environment, and one whose Python an upgrade or another image has taken away."""
    venv = checkout / ".venvs/desk"
    if python == "the image's":
        venv.parent.mkdir()
        venv.symlink_to("/gone/with/the/image")
    else:
        (venv / "bin").mkdir(parents=True)
        (venv / "lib").mkdir()
    if python == "gone":
        (venv / "bin/python").symlink_to("/usr/bin/python-that-went")
    if python == "another system's":
        (venv / "bin/python").write_text("#!/nowhere/python\n")
        (venv / "bin/python").chmod(0o755)
    code, out = shell(checkout, "bash trainer/shell/setup.sh desk")
    assert code == 0 and "environment desk is ready" in out, out
    (checkout / "calls").unlink()
    assert shell(checkout, "bash trainer/shell/setup.sh desk") == (0, ""), "one that runs stays"
    assert not (checkout / "calls").exists()


def test_an_environment_of_one_s_own_that_does_not_run_is_left_and_named(checkout):
    venv = checkout / ".venvs/desk"
    (venv / "bin").mkdir(parents=True)
    (venv / ".pinned").touch()
    (venv / "bin/python").symlink_to("/usr/bin/python-that-went")
    code, out = shell(checkout, "bash trainer/shell/setup.sh desk")
    assert code == 2 and f"{venv}" in out and (venv / ".pinned").exists()


NO_ROOM = (
    "error: Failed to write to the client cache: No space left on device (os error 28)",
    "error: failed to create directory `.venvs/desk/lib`: Read-only file system (os error 30)",
    "error: failed to copy file: Disk quota exceeded (os error 122)",
)


@pytest.mark.parametrize("said", NO_ROOM)
def test_a_disk_that_fills_while_packages_are_written_may_be_freed_before_the_next_start(checkout, said):
    (checkout / "said").write_text(said + "\n")
    (checkout / "fails").write_text("x\n" * 9)
    code, out = shell(checkout, "bash trainer/shell/setup.sh desk")
    assert code == 35 and "again in" not in out
    assert "is full, read-only or failing" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("size", "taken", "code"), [(1 << 31, 3 << 29, 35), (1 << 27, 0, 2), (1 << 31, 0, 0)]
)
def test_a_full_disk_may_be_freed_and_a_small_one_is_the_wrong_one(checkout, size, taken, code):
    with small_disk(checkout / ".venvs", size) as disk:
        with (disk / "filler").open("wb") as file:
            if taken:
                os.posix_fallocate(file.fileno(), 0, taken)
        got, out = shell(checkout, "bash trainer/shell/setup.sh desk")
    assert got == code and ("GiB free and environment desk needs 1" in out) == bool(code)


def test_a_disk_without_room_for_a_lock_is_full(checkout):
    with small_disk(checkout / ".venvs", 1 << 16) as disk:
        read_only(disk)
        code, out = shell(checkout, "bash trainer/shell/setup.sh desk")
    assert code == 35 and "is full, read-only or failing" in out.splitlines()[-1]


@pytest.mark.parametrize("words", ["", "other"])
def test_set_up_that_is_called_wrongly(checkout, words):
    assert shell(checkout, f"bash trainer/shell/setup.sh {words}")[0] == 2


BEGIN = 'export RUN_ID=r BUCKET= WORK="$PWD/work"; . trainer/shell/task.sh begin "" "";'
KEPT = {code: code for code in (0, 1, 2, 35, 38, 130)}
CODES = KEPT | {126: 1, 127: 1, 137: 1, 139: 1, 143: 33}
"""How a step or what must be done ends, and the code of the project that a task then leaves with."""


@pytest.mark.parametrize(("ends", "code"), CODES.items())
def test_a_step_and_what_must_be_done_leave_with_a_code_of_the_project(checkout, ends, code):
    for what in ('step "$PWD/there"', 'step "$DATA/rows/x"', "must"):
        got, out = shell(checkout, f"{BEGIN} {what} bash -c 'exit {ends}'; exit 0")
        assert got == code, out


@pytest.mark.parametrize("said", [AWAY[0], NO_ROOM[0]])
@pytest.mark.parametrize("which", ["a step", "the environment"])
def test_a_set_up_that_cannot_be_made_is_counted_in_the_runs_record(checkout, which, said):
    """Platforms start again after 35 without limit. Here the run may fail once before its next checkpoint."""
    client = checkout / ".venvs/cpu/bin/python"
    client.parent.mkdir(parents=True)
    client.write_text(f'#!/bin/bash\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    client.chmod(0o755)
    (checkout / "said").write_text(said + "\n")
    (checkout / "fails").write_text("x\n" * 99)
    ends = {
        "a step": "step \"$PWD/no\" bash -c 'exit 35'",
        "the environment": "bash trainer/shell/setup.sh gpu",
    }
    more = {"BUCKET": f"file://{checkout}/bucket", "SPOTRL_SETUP_PATIENCE_S": "0", "CC": "true"}

    def start(limits: str, **node: str) -> tuple[int, str]:
        begin = f'export RUN_ID=r WORK="$PWD/work"; . trainer/shell/task.sh begin asked / "{limits}";'
        return shell(checkout, f"set -e; {begin} {ends[which]}; exit 0", **more, **node)

    for _ in range(3):
        assert start("")[0] == 35, "a machine that samples counts nothing"
        assert start("10 1", SKYPILOT_NODE_RANK="1")[0] == 35, "the head counts"
    assert start("10 1")[0] == 35
    code, out = start("10 1")
    assert code == 38 and "2 attempts failed with no new checkpoint" in out
    record = AttemptRecord(Storage(f"file://{checkout}/bucket/r/attempts"))
    assert [past.code for past in record.past()] == [35, 35]
    assert start("10 1")[0] == 38, "the run is over"


def test_a_full_disk_before_the_nodes_own_code_is_35(checkout):
    with small_disk(checkout / ".cache", 1 << 16) as disk:
        config = f'{BEGIN} write ".cache/r.yaml" <<<"$(head -c 100000 /dev/zero | tr "\\0" x)"; exit 0'
        code, out = shell(checkout, config)
        assert code == 35 and "cannot be written: the disk is full" in out
        (disk / "room").unlink()
        fill(disk)
        code, out = shell(checkout, f"{BEGIN} exit 0")
        assert code == 35 and ".cache/room cannot be written: the disk is full" in out


def test_a_file_that_is_run_without_its_set_up_names_what_does_both(checkout):
    code, out = shell(checkout, f"{BEGIN} must .venvs/gpu/bin/python -m recipes.records.manifest; exit 0")
    assert code == 2 and "`sky launch`, not `sky exec`" in out


def test_an_arm_processor_is_refused_by_name(checkout):
    (checkout / "bin/uname").write_text("#!/bin/bash\necho aarch64\n")
    (checkout / "bin/uname").chmod(0o755)
    code, out = shell(checkout, "bash trainer/shell/setup.sh gpu")
    assert code == 2 and "this machine is aarch64" in out and not (checkout / "calls").exists()


def test_rendered_files_run_nothing_whose_code_could_be_another():
    """Every program of the environments is started by `step`, `must` or `keep`, or is the node's own."""
    called = re.compile(r"^\s*(?:(\w+) )?(?:\S+ )?\.venvs/\w+/bin/python -m ([\w.]+)")
    found = []
    for path in sorted((ROOT / "recipes/generated").rglob("*")):
        for line in path.read_text().splitlines() if path.is_file() else ():
            match = called.match(line)
            if match and match[1] not in ("step", "must", "keep", "exec") and match[2] != "trainer.node":
                found.append(f"{path.relative_to(ROOT)}: {line.strip()}")
    assert not found


def test_a_wrong_bucket_or_folder_is_named(checkout):
    begin = 'export RUN_ID=r WORK="$PWD/work"; '
    assert shell(checkout, f"{begin} export BUCKET=mine; . trainer/shell/task.sh begin asked ''")[0] == 2
    (checkout / "work").write_text("a file")
    code, out = shell(checkout, f"{begin} export BUCKET=; . trainer/shell/task.sh begin '' ''")
    assert code == 2 and "cannot be made" in out


def test_data_preparation_waits_for_a_hub_that_is_away(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(hub_files, "PATIENT", Backoff(attempts=3, first_wait_s=0.01))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code = commands.main(["prepare", "someone/rows", "--out", str(tmp_path / "rows")])
    said = capsys.readouterr().err
    assert code == 35 and said.count("again in") == 2 and "cannot be reached" in said.splitlines()[-1]
