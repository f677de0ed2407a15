"""Scores by the rules of benchmarks' own scripts. The verdicts follow from the scripts' code, by hand."""

import pytest

from trainer import config
from trainer.rewards.grading import grader
from trainer.rewards.published import SCORERS, score
from trainer.rewards.scorer import Scorer

COLORS = ["red", "green", "dark green"]
CHOICE = {"question_type": "multi_choice", "answer_type": "text", "choices": COLORS}
INTEGER = {"question_type": "free_form", "answer_type": "integer"}
FLOAT = {"question_type": "free_form", "answer_type": "float", "precision": "1.0"}
LIST = {"question_type": "free_form", "answer_type": "list"}
TEN = {"options": "['north', 'south', 'east', 'west', 'up', 'down', 'left', 'right', 'in', 'out']"}
FIVE = {"options": ["1", "2", "3.14", "4", "5"]}


@pytest.mark.parametrize(
    ("fields", "reference", "text", "expected"),
    [
        (FLOAT, "1.2", "The answer is 1.23", 1),
        (FLOAT, "1.2", "The answer is 1.2 cm.", 1),
        (FLOAT, "1.2", "The answer is 1.26", 0),
        (FLOAT | {"precision": 2.0}, "0.21", "\\boxed{0.2099}", 1),
        (FLOAT, "1.2", "about one", 0),
        (FLOAT, "2.0", "2", 1),
        (INTEGER, "7", "The answer is 7.9", 1),
        (INTEGER, "7", "The answer is 8", 0),
        (INTEGER, "1234", "1,234", 1),
        (INTEGER, "7", "nan", 0),
        (INTEGER, "7", "1e999", 0),
        (CHOICE, "B", "The answer is B", 1),
        (CHOICE, "B", "The answer is (B) green", 1),
        (CHOICE, "B", "The answer is (b) red", 1),
        (CHOICE, "B", "green", 1),
        (CHOICE, "B", 'The answer is "green".', 1),
        (CHOICE, "B", "The answer is greem", 1),
        (CHOICE, "C", "The answer is darkgreen", 1),
        (CHOICE, "B", "The answer is A", 0),
        (CHOICE, "B", "The answer is red", 0),
        (CHOICE, "A", "", 1),  # the script takes the nearest choice to nothing, the shortest
        (LIST, "[1, 2]", "The answer is [1, 2]", 1),
        (LIST, "[1, 2]", "The answer is [1,2]", 0),
    ],
)
def test_mathvista(fields, reference, text, expected):
    assert score("mathvista", text, reference, fields, "any") == expected


def test_what_ours_reads_otherwise():
    """The three differences that the option is for."""
    wrong = [("1.23", "1.2", "number"), ("green", "B", "letter"), ("7.9", "7", "number")]
    assert [grader.decide(*one) for one in wrong] == ["wrong"] * 3


@pytest.mark.parametrize(
    ("reference", "fields", "text", "expected"),
    [
        ("C", FIVE, "So the answer is \\boxed{C}", 1),
        ("C", FIVE, "\\boxed{(C)}", 1),
        ("C", FIVE, "\\boxed{3.14}", 1),
        ("C", FIVE, "\\boxed{3.1416}", 1),
        ("C", FIVE, "First \\boxed{A}, no: \\boxed{C}", 1),
        ("C", FIVE, "The correct choice is (C).", 1),
        ("C", FIVE, "C\nbecause", 1),
        ("C", FIVE, "\\boxed{A}", 0),
        ("C", FIVE, "The answer is 3.14.", 1),
        ("12", {}, "the answer is 12", 1),
        ("12", {}, "The answer is 12. It is even.", 1),
        ("0.5", {}, "\\boxed{\\frac{1}{2}}", 1),
        ("0.33", {}, "\\boxed{\\frac{1}{3}}", 1),
        ("0.33", {}, "\\boxed{0.34}", 0),
        ("(1,2)", {}, "\\boxed{(1, 2)}", 1),
        ("60", {}, "\\boxed{60^{\\circ}}", 1),
        ("5", {}, "\\boxed{x = 5}", 1),
        ("5", {}, "\\boxed{}", 0),
        ("5", {}, "no idea", 0),
    ],
)
def test_mathvision(reference, fields, text, expected):
    assert score("mathvision", text, reference, fields, "any") == expected


@pytest.mark.parametrize(
    ("reference", "text", "expected"),
    [
        ("D", "It sets there. Answer: D", 1),
        ("D", "Answer: A. No. Answer: D", 1),
        ("D", "Answer: C or D (D)", 1),  # two letters: brackets decide
        ("D", "I choose (B), but then (D)", 1),
        ("D", "I choose (D), but then (B)", 0),
        ("D", "it must be D ", 1),
        ("D", "The sun goes down every day in the west", 1),
        ("F", "The sun goes down every day in the west", 0),
        ("D", "no idea", 0.1),  # the script guesses
    ],
)
def test_mmmu_pro(reference, text, expected):
    assert score("mmmu-pro", text, reference, TEN, "any") == pytest.approx(expected)


def test_mathverse_has_no_rules_and_long_texts_are_wrong():
    assert "mathverse" not in SCORERS
    assert score("mathvision", "x" * 1_000_000, "1", {}, "any") == 0.0


def test_a_scorer_scores_in_its_processes_and_groups_answers_by_value():
    with Scorer(config.Rewards(workers=1, answer="any")) as scorer:
        texts = ["The answer is 1.23", "The answer is 1.3"]
        assert scorer.as_published("mathvista", texts, "1.2", FLOAT) == [1.0, 0.0]
        answers = [
            ("1/2", 0.0),
            ("0.5", 0.0),
            ("\\frac{1}{2}", 0.0),
            ("0.7", 0.0),
            ("3", 1.0),
            ("3.0", 1.0),
            (None, 0.0),
        ]
        grouped = scorer.by_value(answers, "number")
    assert [answer for answer, _ in grouped] == ["1/2", "1/2", "1/2", "0.7", "3", "3", None]
