"""`bundle`: one file for a maintainer, its contents listed first, without any secret."""

import json
import tarfile

import pytest
from desk import elsewhere as elsewhere
from desk import run

from recipes.drivers import bundle
from recipes.records import run_record
from recipes.records.run_record import RunRecord

HUB = "hf_" + "q7" * 17
SECRETS = {
    "a token of the environment": "the-wandb-key-of-this-desk",
    "another's hub token": HUB,
    "an AWS key": "AKIA" + "Q7" * 8,
    "a password in an address": "hunter22",
    "a signed query": "9f3e77ab",
    "a header": "abcdefgh12345678",
    "an assignment": "s3cr3t-of-a-script",
    "a private key": "MIIEvQIBADANBgkqhkiG9w0",
    "the run's fleet key": "fleet-key-0123456789",
    "a person's row": "what is on the picture",
}
LOG = f"""step 1
WANDB_API_KEY is {SECRETS["a token of the environment"]} here
{HUB} and {SECRETS["an AWS key"]}
GET https://me:{SECRETS["a password in an address"]}@grader.example/x?token={SECRETS["a signed query"]}&n=1
Authorization: Bearer {SECRETS["a header"]}
MY_SCRIPT_TOKEN="{SECRETS["an assignment"]}"
-----BEGIN PRIVATE KEY-----
{SECRETS["a private key"]}
-----END PRIVATE KEY-----
joined with {SECRETS["the run's fleet key"]}
rank 3 died: CUDA error; max_tokens: 2048, tokens: 17
"""


@pytest.fixture
def failed(tmp_path, monkeypatch):
    """A run that failed: its folder has everything that one can have."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", SECRETS["a token of the environment"])
    RunRecord(run_id="mine", recipe="demo", target="local", why="rank 3 died").save()
    folder = run_record.RUNS / "mine"
    lines = "".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in range(20_000))
    files = {
        "config.yaml": f"rewards:\n  remote_url: https://me:{SECRETS['a password in an address']}@host/x\n",
        "metrics.jsonl": lines,
        "samples.jsonl": SECRETS["a person's row"],
        "launch.log": "x" * 300_000 + "\n" + LOG,
        "node-1.log": LOG,
        "hang-3/rank-3.txt": "Thread 0x7f: forward\n",
        "preflight.json": "{}",
        "fleet.key": SECRETS["the run's fleet key"],
        "task/demo.yaml": "name: demo\n",
        "manifest.json": json.dumps(
            {"launch": {"commit": "abc", "diff": f"+{HUB}", "untracked_diff": "+secret row"}}
        ),
        "checkpoints/step-00000001/state.json": "{}",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return tmp_path


def test_it_holds_what_a_maintainer_needs_and_no_secret(failed, capsys):
    code, out, err = run(capsys, "bundle", "mine", "--dry-run")
    assert (
        code == 0
        and "mine/mine-bundle.tar.gz" in out
        and not (failed / "runs/mine/mine-bundle.tar.gz").exists()
    )
    code, out, err = run(capsys, "bundle", "mine")
    assert code == 0, err
    path = failed / "runs/mine/mine-bundle.tar.gz"
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        held = {entry.name.partition("/")[2]: archive.extractfile(entry).read().decode() for entry in archive}
    assert all(f" {name}" in out for name in held), "its contents are listed"
    assert set(held) == {
        "versions.json", "config.yaml", "launch.json", "manifest.json", "metrics.jsonl", "launch.log",
        "node-1.log", "hang-3/rank-3.txt", "preflight.json", "task/demo.yaml",
    }  # fmt: skip
    whole = "".join(held.values())
    for what, secret in SECRETS.items():
        assert secret not in whole, what
    for kept in (
        "rank 3 died: CUDA error; max_tokens: 2048, tokens: 17",
        "grader.example",
        "n=1",
        '"step": 19999',
    ):
        assert kept in whole, kept
    assert "secret row" not in whole and json.loads(held["manifest.json"])["launch"]["commit"] == "abc"
    assert len(held["metrics.jsonl"]) <= bundle.TAIL_BYTES and json.loads(
        held["metrics.jsonl"].splitlines()[0]
    )
    assert '"python"' in held["versions.json"]
    code, _, err = run(capsys, "bundle", "mine")
    assert code == 2 and "is there already: give another name with --out" in err


def test_what_cannot_be_freed_of_secrets_is_not_written(failed, capsys, monkeypatch):
    monkeypatch.setattr(bundle, "secret_cleaner", lambda secrets: lambda text: (text, 0))
    code, _, err = run(capsys, "bundle", "mine")
    assert code == 2 and "could not be taken out: no bundle is written" in err
    assert not (failed / "runs/mine/mine-bundle.tar.gz").exists()


@pytest.mark.parametrize("name", ["..", "gone", "../runs/mine/../.."])
def test_a_run_that_is_not_here(failed, capsys, name):
    code, out, err = run(capsys, "bundle", name)
    assert code == 2 and not out.strip(), out
