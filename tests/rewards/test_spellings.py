"""Spellings that users' answers have: angles, words, other scripts, lists, lettered parts, dates; and what
they must not be mistaken for."""

import pytest

from trainer.rewards.grading import grader

TRIANGLE = "What kind of triangle is ABC?"
EQUAL = [
    # angles
    ("60^\\circ", "\\frac{\\pi}{3}", ""),
    ("60^\\circ", "\\frac{\\pi}{3} \\text{ rad}", ""),
    ("\\frac{\\pi}{3}", "60^\\circ", ""),
    ("\\frac{\\pi}{3}", "60 \\text{ degrees}", ""),
    ("2\\pi", "360°", ""),
    ("\\pi \\text{ radians}", "180^\\circ", ""),
    ("-\\frac{3\\pi}{4}", "-135^\\circ", ""),
    ("30^\\circ, 150^\\circ", "\\frac{\\pi}{6}, \\frac{5\\pi}{6}", ""),
    # words
    ("7", "seven", ""),
    ("7", "\\text{Seven}", ""),
    ("seven", "7", ""),
    ("21", "twenty-one", ""),
    ("99", "ninety nine", ""),
    ("100", "one hundred", ""),
    ("0", "zero", ""),
    ("-5", "negative five", ""),
    ("\\frac{1}{2}", "one half", ""),
    ("0.5", "a half", ""),
    ("\\frac{2}{3}", "two thirds", ""),
    ("\\frac{2}{3}", "two-thirds", ""),
    ("three quarters", "0.75", ""),
    ("\\frac{3}{2}", "one and a half", ""),
    ("2\\frac{3}{4}", "two and three quarters", ""),
    ("5 \\text{ cm}", "five cm", ""),
    ("5", "five apples", "How many apples are left?"),
    ("(1, 2)", "(one, two)", ""),
    # scripts
    ("60", "٦٠", ""),
    ("60", "۶۰", ""),
    ("60", "६०", ""),
    ("60", "６０", ""),
    ("3.5", "٣٫٥", ""),
    ("25\\%", "٢٥٪", ""),
    ("21", "二十一", ""),
    ("100", "一百", ""),
    ("2024", "二〇二四", ""),
    ("\\frac{2}{3}", "三分之二", ""),
    ("25\\%", "百分之二十五", ""),
    ("3", "三个", ""),
    ("-4", "负四", ""),
    ("二十一", "21", ""),
    # lists
    ("[11, 13]", "11, 13", ""),
    ("[11, 13]", "[11,13]", ""),
    ("[11, 13]", "11, 13", "What are the ages of the two?"),
    # lettered parts
    ("(a) 3 (b) 4", "(a) 3, (b) 4", ""),
    ("(a) 3, (b) 4", "(a) 3 (b) 4", ""),
    ("(a) 3; (b) 4", "a) 3 b) 4", ""),
    ("(a) 3 (b) 4", "(a)3(b)4", ""),
    ("(A) 3 (B) 4", "(A) 3, (B) 4", ""),
    ("60^\\circ", "sixty degrees", ""),
    ("12 \\text{ cm}", "十二厘米", ""),
    ("right", "right triangle", TRIANGLE),
    ("[1, 2]", "1, 2", "Arrange the oranges: which two are left?"),
    ("(a) 3 (b) 4", "(b) 4, (a) 3", ""),
    ("(a) 3 (b) 4", "3, 4", ""),
    ("(a) 3 and (b) 4", "(a) 3 (b) 4", ""),
    ("(i) \\frac12 (ii) \\sqrt{8}", "(i) 0.5, (ii) 2\\sqrt{2}", ""),
    ("(a) yes (b) no", "(a) Yes, (b) No", ""),
    # dates
    ("June 5", "5 June", ""),
    ("5 June", "June 5", ""),
    ("June 5, 2020", "5 June 2020", ""),
    ("June 5, 2020", "5th of June, 2020", ""),
    ("June 5, 2020", "2020-06-05", ""),
    ("May 5", "5 May", ""),
    ("5 May", "May 5th", ""),
    ("25/12/2020", "12/25/2020", ""),
    ("12/25/2020", "December 25, 2020", ""),
    ("6月5日", "June 5", ""),
    # a noun of the question
    ("isosceles", "isosceles triangle", TRIANGLE),
    ("isosceles triangle", "isosceles", TRIANGLE),
    ("isosceles", "Isosceles triangle.", "Is the triangle isosceles or scalene?"),
    ("blue", "blue color", "What color is the ball?"),
    ("acute", "acute angle", "Classify the angle."),
    # names
    ("x_1", "x1", ""),
    ("a^{bc}", "(a^b)^c", ""),
]
DIFFERENT = [
    ("60^\\circ", "\\pi", ""),
    ("60^\\circ", "\\frac{\\pi}{3}^\\circ", ""),
    ("60", "\\frac{\\pi}{3}", ""),
    ("\\frac{\\pi}{3}", "60", ""),
    ("60^\\circ", "60 \\text{ rad}", ""),
    ("2\\pi", "360", ""),
    ("90^\\circ", "\\frac{\\pi}{2} = 60^\\circ", ""),
    ("7", "seven or eight", ""),
    ("7", "seventh", ""),
    ("7", "seventy", ""),
    ("7", "not seven", ""),
    ("7", "seven hundred", ""),
    ("7", "seven eight", ""),
    ("20", "twenty ten", ""),
    ("2", "two thirds", ""),
    ("\\frac{20}{5}", "twenty fifths", ""),
    ("\\frac{1}{2}", "one second", ""),
    ("2", "a second", ""),
    ("\\frac{1}{3}", "third", ""),
    ("12", "a dozen", ""),
    ("3", "three dozen", ""),
    ("5", "five apples", "How many pears are left?"),
    ("1", "a", ""),
    ("60", "٦٠٠", ""),
    ("60", "六", ""),
    ("12", "二一", ""),
    ("20", "二十二", ""),
    ("3", "三或四", ""),
    ("\\frac{2}{3}", "二分之三", ""),
    ("[1, 2]", "1, 2", "What is the domain of f?"),
    ("[1, 2]", "1, 2", "For which x is 1 \\le x?"),
    ("[11, 13]", "13, 11", ""),
    ("[11, 13]", "11, 13, 15", ""),
    ("11, 13", "[11, 13]", ""),
    ("(a) 3 (b) 4", "(a) 4 (b) 3", ""),
    ("(a) 3 (b) 4", "(a) 3", ""),
    ("(a) 3 (b) 4", "(a) 3 (b) 4 (c) 5", ""),
    ("(a) 3 (b) 4", "(a) 3 (b) 4 (b) 5", ""),
    ("(a) 3 (b) 4", "(a) 3 (c) 4", ""),
    ("(a) 3 (b) 4", "4, 3", ""),
    ("(a) 3 (b) 4", "\\{3, 4\\}", ""),
    ("12", "(a) 3 (b) 4", ""),
    ("June 5", "6 June", ""),
    ("June 5", "July 5", ""),
    ("June 5, 2020", "June 5, 2021", ""),
    ("June 5, 2020", "5 June", ""),
    ("5/6/2020", "6/5/2020", ""),
    ("5/6/2020", "June 5, 2020", ""),
    ("5", "5 June", ""),
    ("isosceles", "scalene triangle", TRIANGLE),
    ("isosceles", "isosceles scalene", "Is the triangle isosceles or scalene?"),
    ("isosceles", "not isosceles triangle", TRIANGLE),
    ("isosceles", "isosceles square", TRIANGLE),
    ("isosceles", "isosceles triangle", ""),
    ("square", "square triangle", "Is it a triangle or a square?"),
    ("left", "left right", "Is the angle on the left or right?"),
    ("red", "red blue", "Which ball is larger, red or blue?"),
    ("yes", "yes no", "What is it, yes or no?"),
    ("yes", "yes triangle no", TRIANGLE),
    ("horse", "horse dog", "Which is faster, the horse or the dog?"),
    ("x_1", "x_2", ""),
    ("x_1", "x", ""),
    ("a^{bc}", "a^{b+c}", ""),
    ("a^{bc}", "(a^b)^b", ""),
    ("x", "(x^2)^{1/2}", ""),
]


@pytest.mark.parametrize(("reference", "answer", "question"), EQUAL)
def test_spellings_of_one_answer(reference, answer, question):
    kind = grader.classify(reference)
    assert grader.reference_error(reference, kind) is None
    assert grader.decide(answer, reference, kind, question) == "correct"


@pytest.mark.parametrize(("reference", "answer", "question"), DIFFERENT)
def test_what_looks_alike_and_is_another_answer(reference, answer, question):
    assert grader.decide(answer, reference, grader.classify(reference), question) == "wrong"


@pytest.mark.parametrize(
    ("reference", "answer"), [("seven", "7"), ("5 June", "June 5"), ("(a) yes (b) no", "(a) yes, (b) no")]
)
def test_rows_that_were_prepared_as_text_are_graded_the_same(reference, answer):
    assert grader.decide(answer, reference, "text") == "correct"
