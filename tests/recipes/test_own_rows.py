"""Rows of one's own are planned as what they are, and too few are refused before anything is rented."""

from __future__ import annotations

import json

import pytest

from recipes.cli import main
from recipes.plan.cost import steps_of
from recipes.presets import resolve
from trainer.config import ConfigError

NAME = "grpo-qwen2.5-vl-7b-mathv60k"


@pytest.fixture
def rows(tmp_path):
    """A file of so many rows."""

    def written(count: int, name: str = "mine.jsonl"):
        path = tmp_path / name
        header = "question,answer\n" if path.suffix == ".csv" else ""
        path.write_text(header + "".join(f"row {i}\n" for i in range(count)))
        return path

    return written


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.csv"])
def test_lines_of_files_are_counted(rows, name):
    recipe = resolve(NAME, [f"data.source={rows(6400, name)} --map answer=answer", "data.episodes=1"])
    assert recipe.dataset.rows == 6400
    assert steps_of(recipe) == 6400 // recipe.config.rows_per_step


def test_two_files_with_weights_and_a_limit(rows):
    source = f"{rows(3000, 'a.jsonl')}=2 {rows(1000, 'b.csv')}"
    assert resolve(NAME, [f"data.source={source}"]).dataset.rows == 4000
    assert resolve(NAME, [f"data.source={source} --rows 500"]).dataset.rows == 500


def test_a_published_set_and_a_prepared_folder(tmp_path):
    assert resolve(NAME, ["data.source=geometry3k"]).dataset.rows == 2101
    (tmp_path / "manifest.json").write_text(json.dumps({"rows": {"train": 777, "test": 5}}))
    assert resolve(NAME, [f"data.path={tmp_path}"]).dataset.rows == 777
    assert resolve(NAME, ["data.path=s3://mine/rows"]).dataset.rows == 60_000, "nobody here knows"


def test_too_few_are_refused_at_the_desk(rows, capsys):
    source = f"data.source={rows(30)} --map answer=answer"
    with pytest.raises(
        ConfigError, match="mine has 30 rows and a step takes 64: lower rollout.prompts_per_step"
    ):
        steps_of(resolve(NAME, [source]))
    assert main(["plan", NAME, "--set", source]) == 2
    assert "mine has 30 rows" in capsys.readouterr().err
