"""Where a run's things lie in its bucket and in its folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer import config as c
from trainer.config import run_store
from trainer.config.run_store import RunStore, model_name

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("bucket", ["s3://mine/some/prefix", "s3://mine/some/prefix/", "file:///data"])
def test_everything_lies_below_the_run(bucket):
    store = RunStore.in_bucket(bucket, "run-1")
    assert store.bucket == bucket.rstrip("/")
    for place in ("checkpoints", "rollouts", "attempts"):
        assert getattr(store, place) == f"{store.bucket}/run-1/{place}"
    assert store.profiles == f"{store.bucket}/run-1/profile"
    assert store.exported == f"{store.bucket}/run-1/checkpoints/hf"


def test_a_run_without_a_bucket_has_its_folder():
    config = c.RunConfig(run=c.Run(id="run-1", dir="runs/run-1"))
    assert RunStore.of(config) is None
    assert RunStore.at_run_folder(config).checkpoints == "runs/run-1/checkpoints"
    config = c.override(config, ["checkpoint.remote=s3://mine"])
    store = RunStore.of(config)
    assert store and store.root == "s3://mine/run-1"


def test_nobody_joins_these_addresses_by_hand():
    names = "|".join((run_store.CHECKPOINTS, run_store.ROLLOUTS, run_store.ATTEMPTS, run_store.STREAM))
    # a folder below a run, or a run below a bucket
    joined = re.compile(rf'\}}/({names})\b|/ "({names})"|(bucket|remote|url)\}}/\{{[\w.]*run')
    found = []
    for room in ("trainer", "recipes", "data_prep", "benchmarks"):
        for path in (ROOT / room).rglob("*.py"):
            if path.name == "run_store.py":
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if joined.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
        ("Qwen/Qwen3-VL-8B-Instruct", "Qwen3-VL-8B-Instruct"),
        ("/home/me/runs/warm/hf", "warm"),
        ("runs/warm/pulled/hf", "warm"),
        ("runs/warm/checkpoints/hf/", "warm"),
        ("hf", "hf"),
    ],
)
def test_a_model_is_called_by_its_name_and_an_export_by_its_run(path, name):
    assert model_name(path) == name
