"""Anyone's data: every form that people have, through the command line, shown, exported, mixed and
filtered."""

from __future__ import annotations

import base64
import csv
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import commands
from data_prep.sources.own_files import own
from tests.data_prep import raw
from trainer.config import ConfigError
from trainer.data.dataset import Dataset, read_manifest
from trainer.data.schema import question_text

ROWS = 6
DATA_URL = "data:image/png;base64,"


def lines(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def images(folder: Path) -> list[str]:
    (folder / "imgs").mkdir(parents=True)
    for i in range(ROWS):
        (folder / "imgs" / f"{i}.png").write_bytes(raw.image(i))
    return [f"imgs/{i}.png" for i in range(ROWS)]


def writer(make, ending: str = "d.jsonl", files: bool = True):
    """Writes a file of records and, unless they hold them, images beside it. make: record number, path of its
    image -> record. Returns the file's path."""

    def write(folder: Path) -> Path:
        paths = images(folder) if files else [""] * ROWS
        folder.mkdir(parents=True, exist_ok=True)
        records = [make(i, path) for i, path in enumerate(paths)]
        path = folder / ending
        match path.suffix:
            case ".jsonl":
                lines(path, records)
            case ".json":
                path.write_text(json.dumps(records))
            case ".parquet":
                pq.write_table(pa.Table.from_pylist(records), path)
        return path

    return write


def data_url(i: int) -> str:
    return DATA_URL + base64.b64encode(raw.image(i)).decode()


def held(i: int) -> dict:
    return {"bytes": raw.image(i), "path": None}


def said(role: str, *content: object, names: tuple[str, str] = ("role", "content")) -> dict:
    return dict(zip(names, (role, list(content) if len(content) > 1 else content[0]), strict=True))


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def verl_record(i: int, path: str) -> dict:
    record = {"data_source": "mine", "ability": "math", "images": [held(i)], "extra_info": {"index": i}}
    truth = {"style": "rule", "ground_truth": str(i)}
    return record | {"prompt": [said("user", f"<image>Q{i}?")], "reward_model": truth}


def llava_record(i: int, path: str) -> dict:
    pair = ("from", "value")
    turns = [said("human", f"<image>\nQ{i}?", names=pair), said("gpt", f"The answer is {i}", names=pair)]
    return {"id": str(i), "image": path, "conversations": turns}


def old_qwen_record(i: int, path: str) -> dict:
    pair = ("from", "value")
    asked = said("user", f"Picture 1: <img>{path}</img>\nQ{i}?", names=pair)
    return {"conversations": [asked, said("assistant", str(i), names=pair)]}


def qwen_record(i: int, path: str) -> dict:
    asked = said("user", {"type": "image", "image": path}, text(f"Q{i}?"))
    return {"messages": [asked, {"role": "assistant", "content": [text(f"So it is $\\boxed{{{i}}}$")]}]}


def openai_record(i: int, path: str) -> dict:
    asked = said("user", text(f"Q{i}?"), {"type": "image_url", "image_url": {"url": data_url(i)}})
    reply = f"<think>It shows {i} of them, I count.</think><answer>{i}</answer>"
    return {"messages": [said("system", "Be brief."), asked, said("assistant", reply)]}


def virl39k(folder):
    folder.mkdir()
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for i in range(ROWS):
            archive.writestr(f"images/{i}.png", raw.image(i))
    rows = []
    for i in range(ROWS):
        rates = {"PassRate_32BTrained": i / 5, "PassRate_7BBase": 0.0}
        asked = {"question": f"<image>\nQ{i}?", "answer": f"\\boxed{{{i}}}", "qid": f"q{i}"}
        rows.append(asked | {"image": [f"images/{i}.png"]} | rates)
    pq.write_table(pa.Table.from_pylist(rows), folder / "d.parquet")
    return folder


def table(folder):
    rows = [[f"Q{i}?", i, path] for i, path in enumerate(images(folder))]
    with open(folder / "d.csv", "w", newline="") as file:
        csv.writer(file).writerows([["query", "label", "img"], *rows])
    return folder / "d.csv"


plain = writer(lambda i, path: {"question": f"Q{i}?", "answer": i, "image": path})
easyr1 = writer(
    lambda i, _: {"images": [held(i)], "problem": f"<image>Q{i}?", "answer": str(i)}, "d.parquet", False
)
binary = writer(lambda i, _: {"image": raw.image(i), "question": f"Q{i}?", "answer": i}, "d.parquet", False)
verl = writer(verl_record, "d.parquet", False)
llava = writer(llava_record, "d.json")
qwen = writer(qwen_record)
old_qwen = writer(old_qwen_record)
openai = writer(openai_record, files=False)
base64_lines = writer(
    lambda i, _: {"question": f"Q{i}?", "answer": i, "image": data_url(i).removeprefix(DATA_URL)}, files=False
)
mathv60k = writer(lambda i, _: json.loads(raw.line(f"Q{i}?", f"$\\boxed{{{i}}}$", [f"/far/imgs/{i}.png"])))
QA, CHAT = "question and answer", "LLaVA / ShareGPT"
FORMS = dict.fromkeys(("plain", "easyr1", "binary", "virl39k", "table", "base64_lines"), QA)
FORMS |= {"verl": "verl", "llava": CHAT, "old_qwen": CHAT, "qwen": "messages", "openai": "messages"}
FORMS |= {"mathv60k": "MathV60K"}


def run(*arguments) -> int:
    return commands.main([str(argument) for argument in arguments])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_with_its_images_and_answers(form, tmp_path, capsys):
    source = globals()[form](tmp_path / "raw")
    extra = ("--images", tmp_path / "raw") if form == "mathv60k" else ()
    assert run("prepare", source, *extra, "--name", "mine", "--out", tmp_path / "out", "--validation", 0) == 0
    shown = capsys.readouterr()
    assert f"read as {FORMS[form]}" in shown.err and "reference answers: number: 6" in shown.out
    rows = list(Dataset(tmp_path / "out"))
    assert [row.images for row in rows] == [[raw.image(i)] for i in range(ROWS)]
    assert [row.answer for row in rows] == [str(i) for i in range(ROWS)]
    assert [question_text(row.messages).strip() for row in rows] == [f"Q{i}?" for i in range(ROWS)]
    assert "image" not in str(question_text(rows[0].messages))
    if form == "virl39k":
        assert rows[3].extra["PassRate_32BTrained"] == 0.6
    if form == "openai":
        assert (
            rows[0].messages[0] == {"role": "system", "content": "Be brief."}
            and "I count" in rows[0].solution
        )


def test_text_only_rows_and_types_and_rejected_answers_are_shown(tmp_path, capsys):
    records = [
        {"question": "Big?", "answer": 2**70},
        {"question": "Yes?", "answer": True},
        {"question": "Half?", "answer": 0.50},
        {"question": "Which?", "answer": "B", "choices": ["x", "y"]},
        {"question": "Pick.", "answer": "y2", "choices": "[\"it's\", 'y2']"},
        {"question": "None?", "answer": "$$"},
    ]
    source = lines(tmp_path / "d.jsonl", records)
    assert run("prepare", source, "--out", tmp_path / "out", "--validation", 0) == 0
    rows = {question_text(row.messages).split("\n")[0]: row for row in Dataset(tmp_path / "out")}
    assert rows["Big?"].answer == str(2**70) and rows["Yes?"].answer == "true"
    assert (rows["Which?"].answer, rows["Pick."].answer) == ("B", "B")
    assert question_text(rows["Which?"].messages) == "Which?\n\nA. x\nB. y"
    shown = capsys.readouterr().out
    assert "rejected as math: 1, e.g. ''" in shown and "letter: 2" in shown
    assert read_manifest(tmp_path / "out").quarantined == {"bad_answer": 1}


def test_an_unknown_form_shows_the_first_rows_and_what_was_looked_for(tmp_path, capsys):
    source = lines(tmp_path / "d.jsonl", [{"frage": f"Q{i}", "antwort": i} for i in range(5)])
    assert run("prepare", source, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "columns frage, antwort; looked for a question (question, problem" in error
    assert (
        "--map question=COLUMN" in error
        and error.count("record ") == 3
        and "{'frage': 'Q2', 'antwort': 2}" in error
    )
    assert run("prepare", source, "--map", "question=frage,answer=antwort", "--out", tmp_path / "out") == 0
    assert run("prepare", source, "--map", "question=fragen", "--out", tmp_path / "out") == 2
    assert "no column fragen: there are frage, antwort" in capsys.readouterr().err


def test_all_rows_malformed_are_quarantined_and_the_first_are_shown(tmp_path, capsys):
    good = {"question": "q", "answer": "1"}
    records = [good | {"answer": None}] * 4 + [good | {"image": "https://a.org/b.png"}]
    source = lines(tmp_path / "d.jsonl", records)
    assert run("prepare", source, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "no row can be used: 4 no_answer_field, 1 image_url; all of them are in" in error
    assert error.count('{"reason": "no_answer_field"') == 3
    *_, last = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    assert "https://a.org/b.png is not on this machine: download the images" in json.loads(last)["detail"]


def test_a_dry_run_writes_nothing(tmp_path, capsys, monkeypatch):
    source = plain(tmp_path / "raw")
    monkeypatch.chdir(tmp_path)
    assert run("prepare", source, "--dry-run") == 0
    assert "question  <- question" in capsys.readouterr().err and os.listdir(tmp_path) == ["raw"]
    assert run("prepare", source) == 0 and len(Dataset(tmp_path / "data" / "d")) == ROWS - 1, (
        "one is held out"
    )


def test_file_names_and_columns_give_the_splits(tmp_path):
    lines(tmp_path / "raw" / "train.jsonl", [{"question": f"a{i}", "answer": i} for i in range(3)])
    lines(tmp_path / "raw" / "val.jsonl", [{"question": "b", "answer": 1}])
    with open(tmp_path / "raw" / "test.csv", "w") as file:
        file.write("problem,gold\nc,2\n")
    assert run("prepare", tmp_path / "raw", "--out", tmp_path / "out") == 0
    assert read_manifest(tmp_path / "out").rows == {"train": 3, "test": 1, "validation": 1}
    source = lines(
        tmp_path / "d.jsonl",
        [{"question": f"q{i}", "answer": i, "split": s} for i, s in enumerate(["train", "dev"])],
    )
    assert run("prepare", source, "--out", tmp_path / "out2") == 0
    assert read_manifest(tmp_path / "out2").rows == {"train": 1, "validation": 1}
    assert run("prepare", source, "--out", tmp_path / "out3", "--split", "test") == 0
    assert read_manifest(tmp_path / "out3").rows == {"test": 2}


def test_a_replaced_image_makes_another_dataset(tmp_path, capsys):
    source = plain(tmp_path / "raw")
    assert run("prepare", source, "--out", tmp_path / "out", "--validation", 0) == 0
    first = read_manifest(tmp_path / "out")
    (tmp_path / "raw" / "imgs" / "2.png").write_bytes(raw.image(99))
    assert run("prepare", source, "--out", tmp_path / "out", "--validation", 0) == 2
    assert "holds a dataset made otherwise" in capsys.readouterr().err
    assert run("prepare", source, "--out", tmp_path / "out", "--validation", 0, "--overwrite") == 0
    assert Dataset(tmp_path / "out")[2].images == [raw.image(99)]
    assert read_manifest(tmp_path / "out").fingerprint != first.fingerprint


def test_two_members_of_one_name_with_other_content_are_ambiguous(tmp_path):
    def again(tar):
        for name, data in (("imgs/1.png", raw.image(50)), ("imgs/2.png", raw.image(2))):
            info = raw.tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, raw.io.BytesIO(data))

    archive = raw.write_tar(tmp_path / "img.tar.gz", {f"imgs/{i}.png": raw.image(i) for i in range(3)}, again)
    source = lines(
        tmp_path / "d.jsonl", [{"question": f"Q{i}", "answer": i, "image": f"imgs/{i}.png"} for i in range(3)]
    )
    assert run("prepare", source, "--images", archive, "--out", tmp_path / "out", "--validation", 0) == 0
    assert read_manifest(tmp_path / "out").quarantined == {"image_ambiguous": 1}
    assert [row.answer for row in Dataset(tmp_path / "out")] == ["0", "2"]


def test_a_refused_member_is_named_as_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.ingest.archive.MAX_MEMBER_BYTES", 50_000)
    archive = raw.write_tar(tmp_path / "img.tar", {"a.png": raw.image(1), "b.png": bytes(60_000)})
    source = lines(tmp_path / "d.jsonl", [{"question": n, "answer": 1, "image": f"{n}.png"} for n in "ab"])
    assert run("prepare", source, "--images", archive, "--out", tmp_path / "out", "--validation", 0) == 0
    (line,) = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    assert (
        json.loads(line)["reason"] == "image_refused"
        and "60000 bytes, more than" in json.loads(line)["detail"]
    )


def test_an_evaluation_set_keeps_every_row_or_is_refused(tmp_path, capsys):
    same = {"question": "Same?", "answer": "1"}
    records = [
        same,
        same,
        same | {"answer": "2"},
        {"question": "Odd?", "answer": "$$", "precision": 2.0, "unit": "cm"},
    ]
    source = lines(tmp_path / "d.jsonl", records)
    assert run("prepare", source, "--evaluation", "--split", "test", "--out", tmp_path / "out") == 0
    rows = list(Dataset(tmp_path / "out", "test"))
    assert len(rows) == 4 and rows[3].extra == {"precision": "2.0", "unit": "cm"}
    assert "kept as published:       3  conflicting_answers" in capsys.readouterr().out
    source = lines(tmp_path / "e.jsonl", [*records, {"question": "Seen?", "answer": 1, "image": "gone.png"}])
    assert run("prepare", source, "--evaluation", "--split", "test", "--out", tmp_path / "out2") == 2
    assert "1 rows of this evaluation set cannot be asked" in capsys.readouterr().err


def test_rows_for_supervised_training_need_no_answer(tmp_path, capsys):
    long = "Here is a poem that states nothing. " * 10
    source = lines(tmp_path / "d.jsonl", [{"instruction": "Write.", "input": "", "output": long}])
    assert (
        run("prepare", source, "--out", tmp_path / "no") == 2
        and "1 no_answer_field" in capsys.readouterr().err
    )
    assert run("prepare", source, "--sft", "--out", tmp_path / "out", "--validation", 0) == 0
    (row,) = Dataset(tmp_path / "out")
    assert (row.solution, row.answer, row.messages) == (long, "", [{"role": "user", "content": "Write."}])
    assert (
        read_manifest(tmp_path / "out").settings["sft"]
        and "sft" not in read_manifest(_plain(tmp_path)).settings
    )


def _plain(folder: Path) -> Path:
    assert run("prepare", plain(folder / "raw"), "--out", folder / "plain", "--validation", 0) == 0
    return folder / "plain"


def test_questions_of_an_evaluation_set_without_images_are_left_out_too(tmp_path):
    rows = [{"question": f"What is {i} + {i}?", "answer": 2 * i} for i in range(4)]
    held_out = lines(tmp_path / "e.jsonl", [{"question": "WHAT is  2 + 2?", "answer": 4}])
    assert run("prepare", held_out, "--evaluation", "--split", "test", "--out", tmp_path / "e") == 0
    source = ("prepare", lines(tmp_path / "d.jsonl", rows), "--out", tmp_path / "out", "--validation", 0)
    assert run(*source, "--exclude", tmp_path / "e") == 0
    assert read_manifest(tmp_path / "out").quarantined == {"overlap": 1}
    assert [row.answer for row in Dataset(tmp_path / "out")] == ["0", "2", "6"]
    (report,) = read_manifest(tmp_path / "out").statistics["overlaps"]
    assert report["evaluation_rows_touched"] == {"e": 1}


def test_another_language_of_the_machine_changes_nothing(tmp_path):
    source = lines(tmp_path / "d.jsonl", [{"question": "Wie groß ist ∠ABC?", "answer": "60°"}])
    command = [sys.executable, "-m", "data_prep", "prepare", str(source), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command,
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert "∠ABC" in (tmp_path / "out" / "preview.html").read_text(encoding="utf-8")


def test_a_file_that_is_not_what_its_name_says_is_one_line(tmp_path):
    for name, content in (("a.parquet", b"no"), ("a.json", b"{]"), ("a.csv", b"\xff\xfe\x00q")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name}") as caught:
            own(tmp_path / name)
        assert "\n  record 1" not in str(caught.value)
