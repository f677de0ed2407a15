"""The search for replies that earn without the answer finds what a careless function pays for, and nothing in
ordinary questions with the built-in grader."""

from pathlib import Path

import pytest

from trainer.config import Rewards
from trainer.rewards.grading.grader import classify
from trainer.rewards.scorer import Scorer
from trainer.rewards.search import TriedRow, find_payments, report

LINES = (Path(__file__).parent / "questions.tsv").read_text().splitlines()[1:]
ROWS = []
for _line in LINES:
    _reference, _question = _line.split("\t")
    ROWS.append(TriedRow(f"row {len(ROWS)}", _question, _reference, classify(_reference, _question)))


@pytest.fixture(scope="module")
def payments():
    with Scorer(Rewards(workers=1, max_timeout_rate=1.0, max_error_rate=1.0)) as scorer:
        return find_payments(scorer, ROWS)


def test_no_ordinary_question_pays_for_a_span_of_its_own(payments):
    assert len(ROWS) >= 60
    assert [p for p in payments if p.trick == "span"] == []


def test_no_ordinary_question_pays_for_several_values_or_an_edit(payments):
    assert {p.reply for p in payments if p.trick in ("template", "edit")} <= {"Jun 5, 2020"}


def test_constants_pay_where_they_are_the_answer_alone(payments):
    assert [p for p in payments if p.trick == "constant"] == []


def test_a_function_that_looks_for_the_answer_anywhere_is_named(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("def reward(text, reference):\n    return float(reference in text)\n")
    with Scorer(Rewards(workers=1, function=f"{path}:reward", max_error_rate=1.0)) as scorer:
        rows = [
            TriedRow("one", "Is it 4 or 55?", "4", "number"),
            TriedRow("two", "Is it 6 or 17?", "17", "number"),
        ]
        found = find_payments(scorer, rows)
    assert {p.trick for p in found} >= {"span", "template", "constant"}
    lines = report(rows, found)
    assert lines[0].startswith("2 rows; 2 pay") and any("'0, 1, 2, 3" in line for line in lines)
