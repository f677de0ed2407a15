"""Models and datasets of this machine on rented nodes: uploaded before, fetched whole, or refused."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from desk import elsewhere as elsewhere
from desk import run, stand_in

from recipes.drivers import uploads
from recipes.platforms import script
from recipes.presets import resolve
from recipes.recipe.spec import Step
from recipes.records import run_record
from tests import servers
from tests.recipes.rendered import render
from trainer.config import ConfigError, override

ROOT = Path(__file__).parents[2]
SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"
CONFIG = """{"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"],
 "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
 "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
 "tie_word_embeddings": false, "vision_config": {"hidden_size": 1280, "depth": 32,
 "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584, "patch_size": 14,
 "spatial_merge_size": 2, "temporal_patch_size": 2, "in_chans": 3, "window_size": 112,
 "fullatt_block_indexes": [7, 15, 23, 31]}}"""


@pytest.fixture
def mine(tmp_path):
    """A model and a dataset of this machine."""
    for folder, files in {
        "Mine": {"config.json": CONFIG, "model.safetensors": "w" * 5000},
        "rows": {"manifest.json": "{}", "train/0.parquet": "rows"},
    }.items():
        for name, text in files.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return tmp_path


@pytest.fixture
def s3_server(mine, monkeypatch):
    """A real S3 server with one bucket, whose files lie in `disk/bucket`."""
    with servers.rclone(mine / "disk") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.parametrize("target", ["skypilot-runpod", "dstack-runpod", "skypilot"])
def test_nodes_fetch_what_the_desk_uploads(mine, target):
    recipe = resolve(SEVEN, [f"model.path={mine}/Mine", f"data.path={mine}/rows"])
    staged = uploads.with_uploads(recipe, target, {})
    keys = {upload.field: upload.key for upload in staged.uploads}
    assert set(keys) == {"model.path", "data.path"} and keys["model.path"].startswith("models/mine-")
    task = next(iter(render(staged, target).values()))
    name = keys["model.path"].partition("/")[2]
    assert f'-m trainer.storage fetch "${{BUCKET}}/models/{name}" "${{MODELS}}/{name}"' in task
    assert f'path: "${{MODELS}}/{name}"' in task and str(mine) not in task
    assert "data_prep prepare mathv60k" not in task, "60,000 rows that nobody reads"
    (mine / "Mine/model.safetensors").write_text("other")
    assert uploads.with_uploads(recipe, target, {}).uploads[0].key != keys["model.path"], (
        "another state has another key"
    )
    assert {u.field: u.key for u in uploads.with_uploads(recipe, target, keys).uploads} == keys, (
        "a run keeps its own"
    )


def test_a_machine_that_samples_fetches_no_teacher(mine):
    teacher = ["algorithm.kl_coef=0", f"algorithm.teacher={mine}/Mine"]
    fleet = ["fleet.workers=only", "rollout.tensor_parallel=1", "storage.bucket=s3://mine"]
    recipe = resolve(SEVEN, [*teacher, *fleet])
    sampler = resolve(SEVEN, [*teacher, *fleet, "fleet.run=mine"])
    assert [one.field for one in uploads.with_uploads(recipe, "skypilot", {}).uploads] == [
        "algorithm.teacher"
    ]
    assert uploads.with_uploads(sampler, "skypilot", {}).uploads == ()
    made = Step(creates="${MODELS}/big/config.json", module="made.teacher")
    config = override(recipe.config, ["algorithm.teacher=${MODELS}/big"])
    steps = [one.module for one in script.on_node(replace(recipe, config=config, steps=[made])).steps]
    others = script.on_node(replace(sampler, config=config, steps=[made])).steps
    assert steps == ["made.teacher"] and not others


def test_targets_that_see_the_folder_are_left_alone(mine):
    recipe = resolve(SEVEN, [f"model.path={mine}/Mine"])
    for target in ("slurm", "pbs", "ssh", "local"):
        assert uploads.with_uploads(recipe, target, {}) is recipe


@pytest.mark.parametrize(
    ("assignment", "why"),
    [
        ("model.path=/nowhere/model", "model.path /nowhere/model has no config.json on this machine"),
        ("data.path=/nowhere/rows", "data.path /nowhere/rows has no manifest.json"),
        (
            "rewards.function=/home/me/reward.py:score",
            "rewards.function /home/me/reward.py is not on the nodes",
        ),
        ("turns.environment=/home/me/mine.py:Mine", "turns.environment /home/me/mine.py is not on the nodes"),
    ],
)
def test_what_nodes_could_not_have_is_refused(assignment, why):
    with pytest.raises(ConfigError, match=why):
        uploads.with_uploads(resolve(SEVEN, [assignment]), "skypilot-runpod", {})


def test_a_folder_goes_to_the_bucket_before_anything_is_rented_and_is_fetched_whole(
    mine, capfd, monkeypatch, s3_server
):
    bucket = mine / "disk/bucket"
    found = f"find {bucket} -name config.json | grep -q . && echo uploaded-before >> {mine}/calls"
    stand_in(mine, monkeypatch, "sky", found)
    monkeypatch.chdir(mine)
    up = f"up {SEVEN} --target skypilot-runpod --detach --run-id mine --bucket s3://bucket/".split()
    code, out, err = run(capfd, *up, "--set", "model.path=Mine")
    assert code == 0, err
    assert f"uploading {mine}/Mine (0.00 GiB) to s3://bucket/models/mine-" in out
    assert "uploaded-before" in (mine / "calls").read_text()
    assert "2 files, " in out, "how much, and how long it took"
    key = run_record.load_record("mine").uploads["model.path"]
    (mine / "Mine/config.json").unlink()
    code, out, err = run(capfd, "resume", "mine", "--dry-run")
    assert code == 0 and key.partition("/")[2] in out, "the bucket has it"
    target = mine / "node/model"
    fetch = [sys.executable, "-m", "trainer.storage", "fetch"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([*fetch, f"s3://bucket/{key}", str(target)], env=env).returncode == 0
    assert (target / "model.safetensors").read_text() == "w" * 5000
    assert [p.name for p in target.parent.iterdir()] == ["model"]
    missing = subprocess.run([*fetch, "s3://bucket/models/x", str(mine / "x")], env=env, capture_output=True)
    assert missing.returncode == 2 and not (mine / "x").exists()


def test_without_a_bucket_it_is_refused(mine, capsys):
    code, _, err = run(capsys, f"up {SEVEN} --target dstack-ssh --hosts a --set model.path={mine}/Mine")
    assert code == 2 and "give --bucket" in err and err.count("\n") == 1
