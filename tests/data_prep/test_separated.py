"""Tables: quotes that do not pair, line breaks in fields, separators and encodings."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.sources.separated import LINE_BREAKS, STRAY_QUOTES
from tests.data_prep.test_hostile_rows import prepared
from tests.data_prep.test_own import run
from trainer.data.dataset import read_manifest
from trainer.data.schema import question_text


def table(folder, name: str, rows: list[str], encoding: str = "utf-8"):
    path = folder / name
    path.write_bytes("\n".join(rows).encode(encoding))
    return path


@pytest.mark.parametrize(("ending", "between"), [("csv", ","), ("tsv", "\t")])
@pytest.mark.parametrize("closed_by", [None, 'the 5"{0}7', '4" pipe{0}7'])
def test_a_quote_without_a_partner_swallows_no_rows(tmp_path, ending, between, closed_by):
    rows = [f"How many is {i}?{between}{i}" for i in range(200)]
    rows[40] = f'"5 inch screens, how many?{between}3'.replace(", ", " ")
    if closed_by:
        rows[161] = closed_by.format(between)
    source = table(tmp_path, f"d.{ending}", [f"question{between}answer", *rows])
    kept, others = prepared(source, tmp_path / "out")
    assert len(kept) == 200 and not others
    assert question_text(kept[40].messages) == '"5 inch screens how many?'
    assert read_manifest(tmp_path / "out").statistics["notes"] == {STRAY_QUOTES: 1}


def test_a_line_whose_quotes_do_not_pair_is_refused_with_its_number(tmp_path):
    rows = ["question,answer", "How many is 1?,1", '"an, open, one,5', "How many is 2?,2", '"a ""b"" c",3']
    kept, others = prepared(table(tmp_path, "d.csv", rows), tmp_path / "out")
    assert [row.answer for row in kept] == ["1", "2", "3"] and others == {"bad_json": 1}
    assert question_text(kept[2].messages) == 'a "b" c'
    assert "line 3: its quotes do not pair" in (tmp_path / "out" / "quarantine.jsonl").read_text()


def test_quotes_behind_a_backslash_are_read(tmp_path):
    rows = ["question,answer", r'"He said \"hi, you\". How many words?",2']
    kept, _ = prepared(table(tmp_path, "d.csv", rows), tmp_path / "out")
    assert question_text(kept[0].messages) == 'He said "hi, you". How many words?'


def test_fields_with_line_breaks_are_counted_and_said(tmp_path, capsys):
    rows = ["question,answer", '"Choose, one:\nA, 5\nB, 6\nHow many?",2', "And?,3", '"one,\ntwo",4']
    kept, others = prepared(table(tmp_path, "d.csv", rows), tmp_path / "out")
    assert [row.answer for row in kept] == ["2", "3", "4"] and not others
    assert read_manifest(tmp_path / "out").statistics["notes"] == {LINE_BREAKS: 2}
    assert f"note: 2 {LINE_BREAKS}" in capsys.readouterr().out


SEPARATED = [
    ("d.csv", ";", "utf-8", "with ';' between fields"),
    ("d.csv", "\t", "utf-8", "with '\\t' between fields"),
    ("d.csv", "|", "utf-8", "with '|' between fields"),
    ("d.tsv", ",", "utf-8", "with ',' between fields"),
    ("d.csv", ",", "latin-1", "in cp1252 (--encoding names another)"),
    ("d.csv", ";", "cp1252", "in cp1252 (--encoding names another), with ';'"),
    ("d.csv", ",", "utf-16", "in utf-16 "),
    ("d.csv", ",", "utf-16-le", "in utf-16-le "),
    ("d.csv", ",", "utf-16-be", "in utf-16-be "),
    ("d.csv", ",", "utf-8-sig", ""),
    ("d.csv", ",", "utf-8", ""),
]


@pytest.mark.parametrize(("name", "between", "encoding", "stated"), SEPARATED)
def test_separators_and_encodings_are_recognized_and_said_once(
    tmp_path, capsys, name, between, encoding, stated
):
    rows = [f"question{between}answer", *(f"Größe und Maß {i}?{between}{i}" for i in range(6))]
    kept, others = prepared(table(tmp_path, name, rows, encoding), tmp_path / "out")
    assert [question_text(row.messages) for row in kept] == [f"Größe und Maß {i}?" for i in range(6)]
    assert not others
    assert capsys.readouterr().err.count(stated or "names another") == (1 if stated else 0)


def test_what_is_recognized_can_be_named(tmp_path):
    rows = ["question;and|answer", "你;好 1?|1", "你;好 2?|2"]
    source = table(tmp_path, "d.csv", rows, "gb18030")
    told = "--encoding", "gb18030", "--delimiter", "|", "--map", "question=question;and"
    kept, _ = prepared(source, tmp_path / "out", *told)
    assert [question_text(row.messages) for row in kept] == ["你;好 1?", "你;好 2?"]


@pytest.mark.parametrize(
    ("first", "between"), [("sep=;", ";"), ("SEP=,", ","), ("sep=\t", "\t"), ("sep=", ",")]
)
def test_a_first_line_of_spreadsheets_names_the_separator(tmp_path, first, between):
    rows = [first, f"question{between}answer", *(f"How many, {i}; or more?{between}{i}" for i in range(4))]
    rows = [row.replace(between, "", row.count(between) - 1) if "How" in row else row for row in rows]
    kept, others = prepared(table(tmp_path, "d.csv", rows), tmp_path / "out")
    assert [row.answer for row in kept] == ["0", "1", "2", "3"] and not others


def test_two_columns_of_one_name_are_refused(tmp_path, capsys):
    columns = ["question", "answer", "answer"]
    source = table(tmp_path, "d.csv", [",".join(columns), "How many?,1,2"])
    whole = tmp_path / "d.parquet"
    pq.write_table(pa.table([["How many?"], ["1"], ["2"]], names=columns), whole)
    for path in (source, whole):
        assert run("prepare", path, "--out", tmp_path / "out") == 2
        assert f"{path}: 2 columns are named 'answer'" in capsys.readouterr().err
    source = table(tmp_path, "d.csv", ["question,answer,,", "How many?,1,,"])
    assert [row.answer for row in prepared(source, tmp_path / "out")[0]] == ["1"]
    text = '{"question": "And?", "answer": 3}\n{"question": "Q?", "answer": 1, "answer": 2}\n'
    (tmp_path / "d.jsonl").write_text(text)
    kept, others = prepared(tmp_path / "d.jsonl", tmp_path / "lines")
    assert [row.answer for row in kept] == ["3"] and others == {"bad_json": 1}


def test_an_encoding_that_only_a_person_knows_is_asked_for(tmp_path, capsys):
    source = table(tmp_path, "d.csv", ["question,answer", "二加二等于几？,4"], "gb18030")
    assert run("prepare", source, "--out", tmp_path / "out") == 2
    stated = capsys.readouterr().err
    assert "1 bad_record" in stated and "name the file's --encoding" in stated
    for told, stated in (("--encoding", "klingon"), ("--encoding", "hex"), ("--delimiter", "ab")):
        assert run("prepare", source, "--out", tmp_path / "out", told, stated) == 2
        assert f"{told} {stated}: give" in capsys.readouterr().err


def test_a_byte_that_is_no_character_costs_its_row_alone(tmp_path):
    path = tmp_path / "d.csv"
    good = "".join(f"Größe 你好 {i}?,{i}\n" for i in range(6))
    path.write_bytes(b"question,answer\n" + good.encode() + b"a \xff broken one?,7\n")
    kept, others = prepared(path, tmp_path / "out")
    assert len(kept) == 6 and others == {"bad_record": 1}


def test_json_in_other_encodings_is_read(tmp_path):
    text = "".join(f'{{"question": "Größe {i}?", "answer": {i}}}\n' for i in range(4))
    for encoding in ("latin-1", "utf-16"):
        path = tmp_path / f"{encoding}.jsonl"
        path.write_bytes(text.encode(encoding))
        kept, others = prepared(path, tmp_path / encoding)
        assert question_text(kept[1].messages) == "Größe 1?" and not others
