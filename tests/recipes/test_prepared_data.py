"""The rendered shell that prepares data and models: skipped if they exist, or taken from the bucket."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from recipes.platforms import script
from recipes.presets import get

ROOT = Path(__file__).parents[2]


def checkout(folder, environment: str, python: str) -> None:
    """A checkout whose Python of that environment is a script, and whose set-up does nothing."""
    path = folder / f".venvs/{environment}/bin/python"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/bash\n{python}\n")
    path.chmod(0o755)
    (folder / "trainer/shell").mkdir(parents=True)
    for name in ("setup.sh", "driver.sh"):
        (folder / "trainer/shell" / name).write_text("")
    shutil.copy(ROOT / "trainer/shell/task.sh", folder / "trainer/shell")


def test_steps_are_skipped_where_their_result_is_there_or_at_a_url(tmp_path):
    recipe = get("grpo-qwen2.5-0.5b-gsm8k")
    checkout(tmp_path, "gpu", '[ "$2" = trainer.storage ] && exit 2\necho "ran $*"')

    def run(data):
        env = os.environ | {"DATA": data, "BUCKET": "s3://mine"}
        code = "set -euo pipefail\n" + script.setup_commands(recipe, begun=False)
        return subprocess.run(
            ["bash", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        ).stdout

    (tmp_path / ".cache").mkdir()
    assert run(str(tmp_path / "data")) == f"ran -m data_prep prepare gsm8k --out {tmp_path}/data/gsm8k\n"
    assert run("s3://elsewhere/data") == ""
    (tmp_path / "data/gsm8k").mkdir(parents=True)
    (tmp_path / "data/gsm8k/manifest.json").write_text("{}")
    assert run(str(tmp_path / "data")) == ""


def test_the_head_keeps_in_the_bucket_what_it_has_prepared_and_the_next_machine_takes_it(tmp_path):
    recipe = get("demo")
    name = recipe.steps[0].creates.removeprefix("${DATA}/").partition("/")[0]
    store = f'[ "$2" != trainer.storage ] || exec {sys.executable} "$@"'
    made = f"$DATA/{name}"
    make = (
        f'[ "$2" != examples.demo.shapes ] || {{ mkdir -p "{made}"; echo "{{}}" > "{made}/manifest.json"; }}'
    )
    checkout(tmp_path, "cpu", f'echo "$2 $3"\n{store}\n{make}')
    setup = script.setup_commands(recipe, begun=False)
    code = f"set -euo pipefail\n{setup}{script.keep_commands(recipe)}wait\n"

    def start(node, rank):
        data = tmp_path / node
        data.mkdir(exist_ok=True)
        shutil.rmtree(tmp_path / ".cache", ignore_errors=True)
        (tmp_path / ".cache").mkdir()
        env = os.environ | {"DATA": str(data), "MODELS": str(data), "RUN_ID": "r", "PYTHONPATH": str(ROOT)}
        env |= {"BUCKET": f"file://{tmp_path}/bucket", "SKYPILOT_NODE_RANK": str(rank)}
        done = subprocess.run(
            ["bash", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    kept = tmp_path / "bucket/data" / name / "manifest.json"
    assert "examples.demo.shapes --out" in start("second", 1) and not kept.exists(), "only the head sends"
    assert "trainer.storage send" in start("head", 0) and kept.read_text() == "{}\n"
    again = start("next", 0)
    assert "trainer.storage cp" in again and not {"examples.demo.shapes --out", "trainer.storage send"} & set(
        again
    )

    # A kept disk on which a preparation was cut short: what the bucket has takes its place.
    half = tmp_path / "kept" / name
    half.mkdir(parents=True)
    (half / "half-a-shard").touch()
    assert "trainer.storage cp" in start("kept", 0)
    assert [path.name for path in half.iterdir()] == ["manifest.json"]
