"""One record from outside becomes one row or one reason, and no hostile row costs another one."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.data_prep.test_own import lines, run
from trainer.config import ConfigError
from trainer.data.dataset import Dataset, read_manifest

ROWS = 8


def questions(*changed: dict) -> list[dict]:
    """Sound records, then one for each change."""
    sound = [{"question": f"What is {i} + {i}?", "answer": 2 * i} for i in range(ROWS)]
    return sound + [{"question": f"And {i} + 1?", "answer": i + 1} | one for i, one in enumerate(changed)]


def left_out(folder) -> Counter:
    return Counter(json.loads(line)["reason"] for line in open(folder / "quarantine.jsonl", encoding="utf-8"))


BAD_SPLITS = [
    "/../../above",
    "geometry/easy",
    "a\0b",
    "s" * 300,
    "..",
    ".",
    "a b",
    "../up",
    {"a": 1},
    "\ud83d",
]


def test_no_split_leads_out_of_the_folder(tmp_path):
    records = questions(*({"split": split} for split in BAD_SPLITS))
    source = lines(tmp_path / "in" / "d.jsonl", records)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert run("prepare", source, "--out", tmp_path / "a" / "b" / "out", "--validation", 0) == 0
    out = tmp_path / "a" / "b" / "out"
    written = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert all(path.parent == out for path in written)
    assert read_manifest(out).rows == {"train": ROWS}
    assert left_out(out) == {"bad_record": len(BAD_SPLITS)}


def test_case_and_blanks_of_a_split_are_folded(tmp_path):
    names = ["Train", "TRAIN", " train", "train\n", "Val", "Dev ", "Test_2.b", ""]
    records = [{"question": f"{i}?", "answer": i, "split": name} for i, name in enumerate(names)]
    source = lines(tmp_path / "d.jsonl", records)
    assert run("prepare", source, "--out", tmp_path / "out", "--validation", 0) == 0
    assert read_manifest(tmp_path / "out").rows == {"train": 5, "test_2.b": 1, "validation": 2}


def test_a_column_of_ids_opens_no_thousand_files(tmp_path):
    records = [{"question": f"{i}?", "answer": i, "split": f"id{i}"} for i in range(100)]
    source = lines(tmp_path / "d.jsonl", records)
    assert run("prepare", source, "--out", tmp_path / "out") == 0
    assert len(read_manifest(tmp_path / "out").rows) == 32
    assert left_out(tmp_path / "out") == {"bad_record": 68}


def test_splits_of_a_repository_come_in_by_the_same_door(tmp_path, monkeypatch):
    mirror = tmp_path / "mirror" / "some" / "set"
    lines(mirror / "rows.jsonl", questions({"split": "/../../above"}))
    out = tmp_path / "a" / "b" / "out"
    assert run("prepare", "some/set", "--mirror", tmp_path / "mirror", "--out", out) == 0
    assert left_out(out) == {"bad_record": 1}
    assert {path.parent for path in (tmp_path / "a").rglob("*.parquet")} == {out}


def test_a_repository_cannot_name_the_folder_above(tmp_path, capsys):
    assert run("prepare", "some/..", "--mirror", tmp_path) == 2
    assert "no file, folder or dataset 'some/..'" in capsys.readouterr().err


def test_the_split_of_the_command_line_is_read_alike(tmp_path, capsys):
    source = lines(tmp_path / "d.jsonl", questions())
    assert run("prepare", source, "--out", tmp_path / "out", "--split", "../x") == 2
    assert "--split: the split is named '../x': use letters" in capsys.readouterr().err
    assert run("prepare", source, "--out", tmp_path / "out", "--split", "Val") == 0
    assert read_manifest(tmp_path / "out").rows == {"validation": ROWS}


@pytest.mark.parametrize(
    "change",
    [
        {"rows": {"../up": 8}},
        {"files": [{"path": "../up.parquet", "split": "train", "rows": 8, "bytes": 1, "sha256": "0"}]},
        {"fingerprint": "../../../../above"},
    ],
)
def test_a_manifest_of_a_bucket_leads_out_of_no_folder(tmp_path, change):
    source = lines(tmp_path / "d.jsonl", questions())
    assert run("prepare", source, "--out", tmp_path / "out", "--validation", 0) == 0
    manifest = tmp_path / "out" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(ConfigError, match="is damaged"):
        Dataset(tmp_path / "out")
