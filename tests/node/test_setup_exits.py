"""What runs before the node's own code: it is patient with a network that is away, and leaves with the
project's codes. The real scripts, with stand-ins for uv and for what they call."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep import cli
from data_prep.ingest import hub
from trainer.backoff import Backoff
from trainer.storage.attempt_record import AttemptRecord
from trainer.storage.storage import Storage

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
        (tmp_path / "trainer").mkdir(exist_ok=True)
        shutil.copy(ROOT / "trainer" / name, tmp_path / "trainer" / name)
    (tmp_path / "requirements").mkdir()
    for name in ("cpu", "gpu", "test", "launch"):
        (tmp_path / f"requirements/{name}.txt").write_text("obstore==0.9\n")
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "uv").write_text(
        '#!/bin/bash\necho "$*" >> calls\n'
        'if [ -s fails ]; then sed -i 1d fails; cat said >&2; exit "$(cat code 2>/dev/null || echo 2)"; fi\n'
        'case "$1" in venv) p="${@: -1}"; mkdir -p "$p/bin"; touch "$p/bin/python"\n'
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
    code, out = shell(checkout, "bash trainer/setup.sh desk")
    assert code == 0 and out.count("again in") == 4 and "environment desk is ready" in out
    shutil.rmtree(checkout / ".venvs")
    (checkout / "fails").write_text("x\n" * 99)
    code, out = shell(checkout, "bash trainer/setup.sh desk", SPOTRL_SETUP_PATIENCE_S="3")
    assert code == 35 and out.strip().splitlines()[-1].startswith(
        "error: the network or the package index stays"
    )


@pytest.mark.parametrize("said", WRONG)
@pytest.mark.parametrize("uv_code", ["1", "2", "101"])
def test_what_no_retry_can_cure_ends_at_once(checkout, said, uv_code):
    (checkout / "said").write_text(said + "\n")
    (checkout / "code").write_text(uv_code)
    (checkout / "fails").write_text("x\n" * 9)
    code, out = shell(checkout, "bash trainer/setup.sh desk")
    assert code == 2 and "again in" not in out and said.strip() in out


@pytest.mark.parametrize(("words", "code"), [("", 2), ("other", 2)])
def test_set_up_that_is_called_wrongly(checkout, words, code):
    assert shell(checkout, f"bash trainer/setup.sh {words}")[0] == code


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (0, 0),
        (1, 1),
        (2, 2),
        (35, 35),
        (38, 38),
        (126, 1),
        (127, 1),
        (137, 1),
        (139, 1),
        (143, 33),
        (130, 130),
    ],
)
def test_a_step_leaves_with_a_code_of_the_project(checkout, ends, code):
    begin = 'export RUN_ID=r BUCKET= WORK="$PWD/work"; . trainer/task.sh begin "" "";'
    for result in ('"$PWD/there"', '"$DATA/rows/x"'):
        got, out = shell(checkout, f"{begin} step {result} bash -c 'exit {ends}'; exit 0")
        assert got == code, out


@pytest.mark.parametrize("which", ["a step", "the environment"])
def test_a_set_up_that_stays_without_network_is_counted_in_the_runs_record(checkout, which):
    """Platforms start again after 35 without limit. Here the run may fail once before its next checkpoint."""
    client = checkout / ".venvs/cpu/bin/python"
    client.parent.mkdir(parents=True)
    client.write_text(f'#!/bin/bash\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    client.chmod(0o755)
    (checkout / "said").write_text(AWAY[0] + "\n")
    (checkout / "fails").write_text("x\n" * 99)
    ends = {"a step": "step \"$PWD/no\" bash -c 'exit 35'", "the environment": "bash trainer/setup.sh gpu"}
    more = {"BUCKET": f"file://{checkout}/bucket", "SPOTRL_SETUP_PATIENCE_S": "0", "CC": "true"}

    def start(limits: str, **node: str) -> tuple[int, str]:
        begin = f'export RUN_ID=r WORK="$PWD/work"; . trainer/task.sh begin asked / "{limits}";'
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


def test_a_wrong_bucket_or_folder_is_named(checkout):
    begin = 'export RUN_ID=r WORK="$PWD/work"; '
    assert shell(checkout, f"{begin} export BUCKET=mine; . trainer/task.sh begin asked ''")[0] == 2
    (checkout / "work").write_text("a file")
    code, out = shell(checkout, f"{begin} export BUCKET=; . trainer/task.sh begin '' ''")
    assert code == 2 and "cannot be made" in out


def test_data_preparation_waits_for_a_hub_that_is_away(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(hub, "PATIENT", Backoff(attempts=3, first_wait_s=0.01))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code = cli.main(["prepare", "someone/rows", "--out", str(tmp_path / "rows")])
    said = capsys.readouterr().err
    assert code == 35 and said.count("again in") == 2 and "cannot be reached" in said.splitlines()[-1]
