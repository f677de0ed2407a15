"""Rows of one's own are planned as what they are, and too few are refused before anything is rented."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.sources.file_records import read
from recipes.commands.cli import main
from recipes.plan.cost import steps_of
from recipes.presets import resolve
from recipes.presets.own_data import rows_in
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


@pytest.mark.parametrize("ending", ["json", "parquet"])
def test_documents_and_tables_are_counted(tmp_path, ending):
    rows = [{"question": f"{i} + 1", "answer": str(i + 1), "images": ["a.png", "b.png"]} for i in range(640)]
    path = tmp_path / f"mine.{ending}"
    if ending == "json":
        path.write_text(json.dumps({"version": 1, "rows": rows}))
    else:
        table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
        pq.write_table(table, path, row_group_size=100)
    recipe = resolve(NAME, [f"data.source={path} --map answer=answer", "data.episodes=1"])
    assert (recipe.dataset.rows, steps_of(recipe)) == (640, 640 // recipe.config.rows_per_step)


def test_the_counts_are_those_of_the_readers_that_prepare(tmp_path):
    texts = {
        "a.jsonl": '{"q": 1}\n\n{"q": 2}\n{"q": 3}',
        "b.csv": 'q,a\n"two\nlines",1\nx,2\n',
        "c.tsv": "q\ta\nx\t1\n",
        "d.json": json.dumps([{"q": 1}, {"q": 2}]),
        "e.json": json.dumps({"p1": {"q": 1}, "p2": {"q": 2}, "p3": {"q": 3}}),
        "f.json": json.dumps({"about": ["x"], "data": [{"q": 1}]}),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    pq.write_table(pa.table({"flag": [True, False], "nested": [[{"a": 1}], []]}), tmp_path / "g.parquet")
    pq.write_table(pa.table({"q": pa.array([], pa.string())}), tmp_path / "h.parquet")
    for path in sorted(tmp_path.iterdir()):
        assert rows_in(path) == sum(1 for _ in read(path)), path.name
    (tmp_path / "i.parquet").write_bytes(b"PAR1 cut short")
    (tmp_path / "j.json").write_text("{")
    assert [rows_in(tmp_path / name) for name in ("i.parquet", "j.json", "none.csv", "k.txt")] == [None] * 4


def test_rows_that_nobody_here_can_count_are_said_to_be_guessed(capsys):
    for given in ("data.source=someone/rows", "data.path=/shared/rows"):
        assert main(["plan", NAME, "--set", given]) == 0
        said = " ".join(capsys.readouterr().out.split())
        where = given.partition("=")[2]
        assert f"nobody here knows how many rows {where} has: planned as 60,000, those of mathv60k" in said
    assert main(["plan", NAME]) == 0
    assert "nobody here knows" not in capsys.readouterr().out
    assert resolve(NAME, ["data.source=someone/rows --rows 640"]).dataset.rows == 640
    assert resolve(NAME, ["data.source=someone/rows --rows 640"]).dataset.guess == ""


def test_two_files_and_a_limit(rows):
    source = f"{rows(3000, 'a.jsonl')} {rows(1000, 'b.csv')}"
    assert resolve(NAME, [f"data.source={source}"]).dataset.rows == 4000
    assert resolve(NAME, [f"data.source={source} --rows 500"]).dataset.rows == 500


def test_a_published_set_and_a_prepared_folder(tmp_path):
    assert resolve(NAME, ["data.source=geometry3k"]).dataset.rows == 2101
    (tmp_path / "manifest.json").write_text(json.dumps({"rows": {"train": 777, "test": 5}}))
    assert resolve(NAME, [f"data.path={tmp_path}"]).dataset.rows == 777
    assert resolve(NAME, ["data.path=s3://mine/rows"]).dataset.rows == 60_000, "`up` asks the bucket"


def test_too_few_are_refused_at_the_desk(rows, capsys):
    source = f"data.source={rows(30)} --map answer=answer"
    with pytest.raises(
        ConfigError, match="mine has 30 rows and a step takes 64: lower rollout.prompts_per_step"
    ):
        steps_of(resolve(NAME, [source]))
    assert main(["plan", NAME, "--set", source]) == 2
    assert "mine has 30 rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("splits", "given", "expected"),
    [
        ({"train": 9, "validation": 2}, [], "validation"),
        ({"train": 9, "validation": 2, "test": 1}, [], "test"),
        ({"train": 9, "testmini": 2}, [], "testmini"),
        ({"train": 9, "mine": 2}, ["evaluation.split=mine"], "mine"),
        ({"train": 9}, ["evaluation.every_steps=0"], "test"),
    ],
)
def test_a_prepared_folder_is_evaluated_on_the_split_that_it_holds_out(tmp_path, splits, given, expected):
    (tmp_path / "manifest.json").write_text(json.dumps({"rows": splits}))
    recipe = resolve("demo", [f"data.path={tmp_path}", *given])
    assert recipe.config.evaluation.split == expected


def test_a_prepared_folder_without_held_out_rows_says_how_to_make_some(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"rows": {"train": 9}}))
    with pytest.raises(ConfigError, match="no rows that are held out.*--validation 0.02"):
        resolve("demo", [f"data.path={tmp_path}"])
