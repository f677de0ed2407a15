"""From a run's manifest back to the run, in a clone of this repository; and everything that is refused on the
way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.records import manifest
from recipes.records.reproduce import differing_keys
from trainer import config as run_config

ROOT = Path(__file__).parents[2]
RECIPE = "grpo-qwen2.5-0.5b-gsm8k"
STRANGER = "is not what a run writes"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone with a change that is not committed, and a stand-in for sbatch."""
    if not manifest.run_git("rev-parse", "HEAD", cwd=ROOT):
        pytest.skip("no git repository here")
    where = tmp_path_factory.mktemp("clone") / "repo"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(where)], check=True)
    for path in (ROOT / "recipes").rglob("*.py"):  # the working tree's code, so that the test speaks of it
        there = where / path.relative_to(ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(path.read_text())
    (where / "launch.py").write_text((ROOT / "launch.py").read_text())
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run([*git, "commit", "-qam", "working tree", "--allow-empty"], cwd=where, check=True)
    preset = where / "recipes/presets/reinforcement.py"
    preset.write_text(preset.read_text().replace('"episodes": 15', '"episodes": 3'))
    (where / "note.txt").write_text("new\n")
    tools = where.parent / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text("#!/bin/bash\necho 5\n")
    (tools / "sbatch").chmod(0o755)
    return where


def launch(clone, *arguments):
    env = os.environ | {"PATH": f"{clone.parent / 'bin'}:{os.environ['PATH']}", "HOME": str(clone.parent)}
    return subprocess.run(
        [sys.executable, "launch.py", *arguments], cwd=clone, capture_output=True, text=True, env=env
    )


@pytest.fixture(scope="module")
def written(clone):
    done = launch(
        clone, "up", RECIPE, "--target", "slurm", "--run-id", "first", "--detach", "--set", "run.seed=7"
    )
    assert done.returncode == 0, done.stderr
    return json.loads((clone / "runs/first/manifest.json").read_text())


def reproduce(clone, data):
    path = clone.parent / "manifest.json"
    path.write_text(json.dumps(data))
    return launch(clone, "reproduce", str(path), "--dry-run", "--trust")


def changed(data, **launch_fields):
    return data | {"launch": data["launch"] | launch_fields}


def test_manifest_holds_what_the_run_was_made_from(written):
    half = written["launch"]
    assert half["recipe"] == RECIPE and half["overrides"] == ["run.seed=7"] and half["target"] == "slurm"
    assert half["config"]["data"]["episodes"] == 3 and half["config"]["run"]["seed"] == 7
    assert set(half["untracked"]) == {"note.txt"} and "note" not in half["diff"]
    assert "gpu.txt" in half["locks"] and len(half["commit"]) == 40
    assert half["fingerprint"] == run_config.fingerprint(
        run_config.from_dict(run_config.RunConfig, half["config"])
    )


def test_the_run_is_made_again_from_commit_and_diff(clone, written):
    (clone / "recipes/presets/reinforcement.py").write_text("broken = (\n")  # the tree has moved on
    try:
        done = reproduce(clone, written)
    finally:
        subprocess.run(["git", "checkout", "-q", "recipes/presets/reinforcement.py"], cwd=clone, check=True)
    assert done.returncode == 0, done.stderr
    assert (
        "episodes: 3" in done.stdout and "seed: 7" in done.stdout and "sbatch" in done.stdout.splitlines()[-2]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"commit": "0" * 40}, "is not in this repository: fetch it first"),
        ({"commit": ""}, "launched without git"),
        ({"diff": "--- a/nothing\n+++ b/nothing\n@@ -1 +1 @@\n-a\n+b\n"}, "diff does not apply"),
        ({"locks": {"gpu.txt": "0"}}, "locked requirements differ from the manifest's: "),
        ({"overrides": ["run.seed=8"]}, "another configuration than the manifest's: run.seed"),
        ({"recipe": "gone"}, "does not resolve at that commit"),
        ({"commit": "--output=/tmp/x"}, STRANGER),
        ({"commit": "../../../x"}, STRANGER),
        ({"commit": 7}, STRANGER),
        ({"untracked": {"../../above": "0"}}, STRANGER),
        ({"untracked": {"/etc/x": "0"}}, STRANGER),
        ({"target": "--help"}, STRANGER),
        ({"overrides": "run.seed=1"}, STRANGER),
        ({"locks": []}, STRANGER),
        ({"config": "x"}, STRANGER),
    ],
)
def test_what_cannot_be_reproduced_is_refused(clone, written, change, message):
    done = reproduce(clone, changed(written, **change))
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_halves_that_do_not_belong_together_are_refused(clone, written):
    run = {"source": "1" * 40, "locks": written["launch"]["locks"]}
    done = reproduce(clone, written | {"run": run})
    assert done.returncode == 2 and "the two halves are of different runs" in done.stderr
    done = reproduce(clone, {"format": 1, "run": run})
    assert done.returncode == 2 and "holds only what the node knew" in done.stderr
    done = reproduce(clone, {"format": 9})
    assert done.returncode == 2 and "format 9" in done.stderr


def test_the_node_adds_its_half(tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    known = {"name": "n", "revision": "r", "fingerprint": "f"}
    files = [{"path": "a.parquet", "sha256": "x"}]
    (data / "manifest.json").write_text(json.dumps(known | {"files": files}))
    config = run_config.RunConfig(
        run=run_config.Run(name="r", dir=str(tmp_path / "run"), seed=3), data=run_config.Data(path=str(data))
    )
    path = tmp_path / "run.yaml"
    path.write_text(run_config.dump(config))
    monkeypatch.setenv("SPOTRL_SOURCE", "abc")
    assert manifest.main(str(path)) == 0
    first = json.loads((tmp_path / "run/manifest.json").read_text())
    assert (first["run"]["source"], first["run"]["seed"]) == ("abc", 3)
    assert first["run"]["hardware"]["cpus"] >= 1
    assert first["run"]["data"] == known | {"files": {"a.parquet": "x"}}
    (tmp_path / "run/manifest.json").write_text(json.dumps(first | {"launch": {"commit": "abc"}}))
    monkeypatch.setenv("SPOTRL_SOURCE", "later")
    assert manifest.main(str(path)) == 0  # a resume keeps what the run was started with
    again = json.loads((tmp_path / "run/manifest.json").read_text())
    assert again["run"] == first["run"] and again["launch"] == {"commit": "abc"}


def test_differences_are_dotted_keys():
    assert differing_keys({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 9}}) == ["a.c", "d"]


def test_a_manifest_from_elsewhere_is_shown_and_asked_for(clone, written):
    """Its diff is code, which would run with the reader's keys."""
    path = clone.parent / "manifest.json"
    path.write_text(json.dumps(written))
    done = launch(clone, "reproduce", str(path), "--dry-run")
    assert done.returncode == 2 and "give --trust" in done.stderr
    assert "option run.seed=7" in done.stderr and "changed file " in done.stderr
