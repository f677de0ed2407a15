"""As what a reference answer is read, and what is kept of that in a row."""

import json

import pytest

from trainer.rewards.grading import grader, kinds


@pytest.mark.parametrize(("reference", "question", "kind"), [
    ("20-30", "", "range"), ("2014-2015", "", "range"), ("0045-231", "", "code"),
    ("1.10", "Which version is it?", "code"), ("1.10", "How many dollars?", "number"),
    ("S. Korea", "", "words"), ("E. coli", "", "words"), ("B", "", "letter"),
    ("B. 4", "Which? A. 3 B. 4", "letter"),
    ("0.25, 0.5", "Order from least to greatest.", "ordered list"),
    ("0.25, 0.5", "Which values occur?", "list"), ("25\\%", "", "percent"), ("\\$5", "", "money"),
    ("5 cm", "", "quantity"), ("14:30", "", "time"), ("June 5, 2020", "", "day"), ("3:4", "", "ratio"),
    ("65+", "", "bound"), ("x > 3", "", "condition"), ("[1, 2)", "", "[)"), ("2\\pi", "", "formula"),
    ("CO_2", "", "code"), ("no solution", "", "nothing"),
])  # fmt: skip
def test_the_kind_of_a_reference_answer(reference, question, kind):
    assert json.loads(kinds.reading(reference, question))["kind"] == kind


def test_a_reading_is_kept_as_json_and_shown_in_words():
    read = kinds.reading("0.25, 0.5, 0.75", "Order 0.75, 0.25 and 0.5 from least to greatest.")
    assert json.loads(read) == {
        "kind": "ordered list", "parts": ["0.25", "0.5", "0.75"], "ordered": True, "asked": ["ordered"],
    }  # fmt: skip
    assert kinds.in_words(read) == "ordered list of 0.25, 0.5, 0.75; asked: ordered"
    assert kinds.in_words(kinds.reading("5 cm")) == "quantity in m^1"
    assert kinds.in_words(kinds.reading("\\frac{")) == "unreadable"


@pytest.mark.parametrize(("reference", "answer"), [("seven", "7"), ("5 June", "June 5")])
def test_rows_that_were_prepared_as_text_are_graded_the_same(reference, answer):
    assert grader.decide(answer, reference, "text") == "correct"
