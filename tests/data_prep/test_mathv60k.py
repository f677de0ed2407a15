"""MathV60K's lines: every way they are written, and every way they are broken."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from data_prep.sources.own_files import own
from data_prep.sources.row_source import BadRow, Candidate, unboxed
from tests.data_prep import raw
from trainer.config import ConfigError


def parse(line: str | bytes):
    with tempfile.TemporaryDirectory() as folder:
        jsonl = Path(folder) / "rows.jsonl"
        sound = raw.line("What stands before?", "$\\boxed{1}$", [PATH])
        jsonl.write_bytes(f"{sound}\n".encode() + (line.encode() if isinstance(line, str) else line) + b"\n")
        (source,) = own(jsonl, "mathv60k", [folder])
        _, row = source.rows()
    return row


VIDEO = [{"type": "video"}]
PATH = raw.FOREIGN + "mathv60k_img/IconQA/3.png"


def test_a_line_is_parsed_into_chat_image_and_answer():
    row = parse(raw.line("Which?\nA. 1\nB. 2", "$\\boxed{B}$", [PATH]))
    assert isinstance(row, Candidate)
    assert (row.index, row.source, row.answer) == (1, "mathv60k/IconQA", "B")
    assert row.messages == [
        {"role": "system", "content": raw.SYSTEM},
        {"role": "user", "content": [{"type": "text", "text": "Which?\nA. 1\nB. 2"}, {"type": "image"}]},
    ]
    assert row.images == [PATH.lstrip("/")]


def test_escaped_slashes_give_the_same_row():
    plain = raw.line("Which </think>?", "$\\boxed{B}$", [PATH])
    assert "\\\\/" in raw.escaped(plain) and parse(raw.escaped(plain)) == parse(plain)


def test_the_message_may_be_a_list_and_the_assistants_turn_is_dropped():
    row = json.loads(raw.line("q", "$\\boxed{1}$", [PATH]))
    message = json.loads(row["message"]) + [{"role": "assistant", "content": "The answer is 1"}]
    assert parse(json.dumps(row | {"message": message})) == parse(json.dumps(row))


@pytest.mark.parametrize(
    ("line", "reason", "says"),
    [
        ("{not json", "bad_json", ""),
        (b"\xff\xfe\x00", "bad_json", ""),
        ("[1, 2]", "bad_json", "a list where an object should be"),
        ({"question": "q", "message": [{"role": "user", "content": "q"}]}, "no_answer_field", ""),
        ({"answer": "1"}, "bad_message", "no list of turns"),
        ({"answer": "1", "message": "[{]"}, "bad_message", "not JSON"),
        ({"answer": "1", "message": "[]"}, "bad_message", "no list of turns"),
        ({"answer": "1", "message": [{"role": "system", "content": "s"}]}, "bad_message", "the last turn"),
        ({"answer": "1", "message": [{"role": "user"}]}, "bad_message", "no content"),
        ({"answer": "1", "message": ["q"]}, "bad_message", "a turn is no object"),
        ({"answer": "1", "message": [{"role": "user", "content": VIDEO}]}, "bad_message", "kind 'video'"),
    ],
)
def test_a_broken_line_is_a_problem_and_never_an_exception(line, reason, says):
    problem = parse(json.dumps(line) if isinstance(line, dict) else line)
    assert isinstance(problem, BadRow) and (problem.reason, problem.index) == (reason, 1)
    assert says in problem.detail


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("$\\boxed{B}$", "B"),
        ("$\\boxed{\\frac{1}{2}}$", "\\frac{1}{2}"),
        ("\\boxed{ 3.5 }", "3.5"),
        ("$7$", "7"),
        ("$$", ""),
        ("$\\boxed{}$", ""),
        ("so \\boxed{1}, no, \\boxed{2}", "2"),
        ("\\boxed{1} \\boxed{2", "1"),
        ("x", "x"),
    ],
)
def test_the_reference_answer_is_the_content_of_the_last_complete_box(answer, reference):
    assert unboxed(answer) == reference


def test_missing_files_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no file or folder .*none.tar.gz"):
        own(tmp_path / "a.jsonl", images=[tmp_path / "none.tar.gz"])
