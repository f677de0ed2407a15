from pathlib import Path

import pytest

from trainer.rewards.grading import grader, measurement_units, quantity
from trainer.rewards.grading.notation import common_notation

CASES = [
    (*line.split("\t"), "")[:5] for line in (Path(__file__).parent / "cases.tsv").read_text().splitlines()[1:]
]
"""(kind, reference, answer, "1" if equal, question) as judged by hand."""


def answer(content: str) -> str:
    return f"<think> … </think>\n<answer> $\\boxed{{{content}}}$ </answer>"


@pytest.fixture(scope="module")
def verdicts():
    return [grader.grade(answer(a), r, grader.classify(r), question) for _, r, a, _, question in CASES]


def test_table_is_large_and_of_all_kinds():
    assert len(CASES) >= 750
    assert len({kind for kind, *_ in CASES}) >= 25
    assert 0.35 < sum(case[3] == "1" for case in CASES) / len(CASES) < 0.75


def test_the_table_is_graded_right(verdicts):
    wanted = ["correct" if case[3] == "1" else "wrong" for case in CASES]
    assert [c for c, v, w in zip(CASES, verdicts, wanted, strict=True) if v != w] == []


@pytest.mark.parametrize("table", ["held_out.tsv", "held_out_kinds.tsv"])
def test_a_held_out_table_has_no_false_positive_and_is_right_at_97_percent(table):
    """Written before what it judges, and not fitted to: its misses are left in. Two labels were turned when
    sums and quotients of plain numbers stopped being answers (`2 + 1` for 3), six that contradicted what
    `cases.tsv` had long said of `\\sqrt{16}`, `|2|`, `\\sqrt{3} + \\sqrt{3}` and 3:4."""
    lines = (Path(__file__).parent / table).read_text().splitlines()[1:]
    rows = [(*line.split("\t"), "")[:4] for line in lines]
    wrong = []
    for reference, a, equal, question in rows:
        verdict = grader.grade(answer(a), reference, grader.classify(reference, question), question)
        if (verdict == "correct") != (equal == "1"):
            wrong.append((reference, a, equal, question))
    assert [row for row in wrong if row[2] == "0"] == []
    assert len(rows) >= 145 and len(wrong) <= 0.03 * len(rows), wrong


def test_fast_path_never_contradicts_the_whole_grader(verdicts):
    for (_, reference, a, _, question), verdict in zip(CASES, verdicts, strict=True):
        quick = grader.decide_fast(a, reference, grader.classify(reference), question)
        assert quick in (None, verdict) or verdict == "no_answer"


def test_every_reference_answer_of_the_table_is_usable_and_equals_itself():
    for reference in sorted({c[1] for c in CASES}):
        assert grader.reference_error(reference, grader.classify(reference)) is None
        assert (
            grader.grade(answer(reference), f"$\\boxed{{{reference}}}$", grader.classify(reference))
            == "correct"
        )


@pytest.mark.parametrize(("reference", "answer_type"), [
    ("A", "letter"), ("$\\boxed{B}$", "letter"), ("(C)", "letter"), ("\\text{D.}", "letter"),
    ("x", "math"), ("5", "number"), ("3.5 cm", "number"), ("25\\%", "number"), ("1,234", "number"),
    ("\\frac{1}{2}", "number"), ("3\\frac12", "number"), ("60^\\circ", "number"), ("3e5", "number"),
    ("Yes", "text"), ("North America", "text"), ("2019-05-06", "text"), ("2\\pi", "math"),
    ("(1, 2)", "math"), ("\\{1, 2\\}", "math"), ("3:4", "math"), ("x^2 + 1", "math"),
    ("\\sqrt{3}", "math"), ("x > 3", "math"),
])  # fmt: skip
def test_classify(reference, answer_type):
    assert grader.classify(reference) == answer_type


@pytest.mark.parametrize(("reference", "answer_type"), [
    ("", "math"), ("$$", "math"), ("$\\boxed{}$", "number"), ("  ", "text"), ("\\frac{", "math"),
    ("x", "number"), ("12", "letter"), ("...", "text"), ("1/0", "number"), ("1 2", "math"),
    (")(", "math"),
])  # fmt: skip
def test_unusable_reference_answer_is_an_error_and_never_rewarded(reference, answer_type):
    assert grader.reference_error(reference, answer_type) is not None
    for a in ("", reference, "5", "A", "x"):
        assert grader.grade(answer(a), reference, answer_type) != "correct"


def test_reference_answer_of_another_row_is_wrong_not_looked_up():
    assert grader.grade(answer("60"), "61", "number") == "wrong"


def test_several_boxes_earn_nothing_even_if_the_last_is_right():
    text = "<answer>" + "".join(f"\\boxed{{{c}}}" for c in "ABCD") + "</answer>"
    assert grader.grade(text, "D", "letter") == "wrong"


def test_clean_is_idempotent_on_the_table():
    for _, reference, a, *_ in CASES:
        assert common_notation(common_notation(reference)) == common_notation(reference)
        assert common_notation(common_notation(a)) == common_notation(a)


@pytest.mark.parametrize(("text", "value", "unit", "percent"), [
    ("1,234.5", "2469/2", "", False), ("3\\frac{1}{2}", "7/2", "", False),
    ("-\\frac{1}{2} cm", "-1/2", "cm", False), ("25 \\%", "25", "", True),
    ("\\$1,000", "1000", "＄", False), ("6.02 \\times 10^{3}", "6020", "", False),
    ("12 \\text{ cm}^2", "12", "cm^2", False), ("60^{\\circ}", "60", "°", False),
    ("3 apples", "3", "apple", False),
])  # fmt: skip
def test_quantity(text, value, unit, percent):
    parsed = quantity.parse(text, text)
    assert parsed is not None
    assert (str(parsed.value), parsed.unit, parsed.percent) == (
        value,
        measurement_units.unit(unit, text),
        percent,
    )


@pytest.mark.parametrize(
    "text",
    ["", "x", "1,2", "1 + 2", "5!", "5x", "5abc", "5 or 6", "1e9999", "1" * 300, "5 thousand", "5 apples"],
)
def test_not_a_quantity(text):
    assert quantity.parse(text) is None


def test_a_matrix_is_no_interval():
    matrix = "x \\in \\begin{pmatrix} 1 & 2 \\end{pmatrix}"
    assert grader.decide(matrix, "1 < x < 2", "math") == "wrong"
    assert grader.decide("1 < x < 2", matrix, "math") == "error", "what the row asks for cannot be read"
