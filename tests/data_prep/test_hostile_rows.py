"""One record from outside becomes one row or one reason, and no hostile row costs another one."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections import Counter

import pytest

from data_prep.ingest.wanted import Wanted
from data_prep.sources.own_files import own
from data_prep.sources.row_source import Candidate
from tests.data_prep import raw
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
        {"files": [{"path": "x" * 300 + ".parquet", "split": "train", "rows": 8, "bytes": 1, "sha256": "0"}]},
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


def prepared(source, out, *more) -> tuple[list, Counter]:
    """Rows that are kept, and the reasons for which the others are left out."""
    assert run("prepare", source, "--out", out, "--validation", 0, *more) == 0
    return list(Dataset(out)), left_out(out)


def peak_mib(action) -> float:
    tracemalloc.start()
    action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


PNG = raw.image(1)
HEIC = b"\0\0\0\x18ftypheic" + bytes(range(256)) * 40


@pytest.mark.parametrize(
    "image", [str(PNG), str({"bytes": PNG, "path": None}), base64.b64encode(PNG).decode()]
)
def test_images_as_data_frames_write_them_are_read(tmp_path, image):
    source = lines(tmp_path / "d.jsonl", questions({"image": image}))
    rows, others = prepared(source, tmp_path / "out")
    assert [row.images for row in rows if row.images] == [[PNG]] and not others


def test_the_memory_of_a_long_text_does_not_grow_with_its_square(tmp_path):
    texts = ("/" + "+/ab" * 60_000, "a/" * 120_000, "word / " * 40_000)
    source = lines(tmp_path / "d.jsonl", questions(*({"image": text} for text in texts)))

    def read():
        (rows,) = own(source)
        assert len(list(rows.rows())) == ROWS + len(texts)
        wanted = Wanted(path for row in rows.rows() if isinstance(row, Candidate) for path in row.images)
        assert not any(map(wanted.match, ("ab", "a", "word "))), "contents, or no images"

    assert peak_mib(read) < 30


HALF = "an emoji \ud83d in two"
TURNS = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "5"}]


@pytest.mark.parametrize("more", [(), ("--sft",)])
def test_half_an_emoji_costs_its_row_alone(tmp_path, more):
    changes = [
        {name: HALF} for name in ("question", "answer", "image", "source", "split", "pass_rate", "system")
    ]
    changes += [{"solution": HALF + " so \\boxed{5}"}, {"choices": ["5", HALF], "answer": "A"}]
    changes += [{"metadata": {HALF: HALF}, HALF: HALF, "question": None}]
    rows, others = prepared(lines(tmp_path / "d.jsonl", questions(*changes)), tmp_path / "out", *more)
    assert len(rows) == ROWS and others.total() == len(changes)
    chats = [{"messages": [{"role": "user", "content": f"{i}?"}, TURNS[1]]} for i in range(ROWS)]
    chats += [{"messages": [{"role": "user", "content": HALF}, TURNS[1]]}]
    chats += [{"messages": [{"role": HALF, "content": HALF}]}]
    rows, others = prepared(lines(tmp_path / "e.jsonl", chats), tmp_path / "chats", *more)
    assert len(rows) == ROWS and others.total() == 2


@pytest.mark.parametrize("more", [(), ("--evaluation", "--split", "test")])
def test_an_evaluation_set_refuses_half_an_emoji_in_one_line(tmp_path, capsys, more):
    source = lines(tmp_path / "d.jsonl", [{"question": HALF, "answer": 1}])
    assert run("prepare", source, "--out", tmp_path / "out", *more) == 2
    assert "bad_record" in capsys.readouterr().err


MARKS = (
    *("<image>", "<IMAGE>", "<Image>", "<img>", "[IMG]", "[image]", "<image:1>", "<image 1>", "<image_1>"),
    *("<image-1>", "<|image|>", "<|image_1|>", "<image_placeholder>", "<ImageHere>", "<img>a.png</img>"),
    *("<|vision_start|><|image_pad|><|vision_end|>", '<img src="a.png" width=40>', "![a](a.png)"),
)  # fmt: skip


@pytest.mark.parametrize("mark", MARKS)
def test_every_mark_of_an_image_is_understood(tmp_path, mark):
    (tmp_path / "a.png").write_bytes(PNG)
    record = {"question": f"Before. {mark} After?", "answer": 5, "image": "a.png"}
    if "a.png" in mark:
        del record["image"]
    rows, others = prepared(lines(tmp_path / "d.jsonl", [record]), tmp_path / "out")
    texts = [{"type": "text", "text": text} for text in ("Before.", "After?")]
    assert rows[0].messages[-1]["content"] == [texts[0], {"type": "image"}, texts[1]]
    assert rows[0].images == [PNG] and not others


def test_frames_and_pages_beyond_the_first_are_counted(tmp_path, capsys):
    first, second = raw.drawing(1), raw.drawing(2)
    for kind in ("GIF", "TIFF", "WEBP", "PNG"):
        whole = raw.encoded(first, kind, save_all=True, append_images=[second])
        (tmp_path / kind.lower()).write_bytes(whole)
    (tmp_path / "one").write_bytes(PNG)
    records = [
        {"question": name, "answer": 1, "image": name} for name in ("gif", "tiff", "webp", "png", "one")
    ]
    rows, _ = prepared(lines(tmp_path / "d.jsonl", records), tmp_path / "out")
    assert len(rows) == 5 and read_manifest(tmp_path / "out").statistics["images"]["with_more_frames"] == 4
    assert "note: 4 images with more frames or pages" in capsys.readouterr().out


@pytest.mark.timeout(60)
def test_a_file_of_the_kernel_that_does_not_end_costs_its_row_alone(tmp_path):
    endless = [{"image": path} for path in ("/proc/kmsg", "/dev/zero", "/dev/tty")]
    rows, others = prepared(lines(tmp_path / "d.jsonl", questions(*endless)), tmp_path / "out")
    assert len(rows) == ROWS and others.total() == len(endless)
