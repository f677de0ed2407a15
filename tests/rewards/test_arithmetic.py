import math
import time

import pytest

from trainer.rewards.grading import arithmetic


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1 + 2 \\cdot 3", 7.0), ("2^{3}", 8.0), ("-2^2", -4.0), ("\\frac{1}{2} + 0.5", 1.0), ("\\sqrt{16}", 4.0),
     ("\\sqrt[3]{27}", 3.0), ("2\\sqrt{3}", 2 * math.sqrt(3)), ("25\\pi", 25 * math.pi), ("(1+2)(3+4)", 21.0),
     ("6 / 3", 2.0), ("- -1", 1.0), ("e", math.e), ("2(3)", 6.0), (".5 \\times 4", 2.0), ("\\cos(0)", 1.0),
     ("2\\sin{\\frac{\\pi}{2}}", 2.0), ("\\ln(e)", 1.0), ("\\tan(\\pi/4)x/x", 1.0)],
)  # fmt: skip
def test_value(expression, value):
    assert arithmetic.evaluate(expression) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "expression",
    ["", "1/2x", "x2", "3\\frac{1}{2}", "5!", "i", "3 + 4i", "1 = 1", "1, 2", "\\sin x", "abc", "9^{9^9}", "2^{99}",
     "1 2", "(1", "1)", "\\frac{1}{0}", "\\sqrt{-1}", "2^3^2", "|2|", "x_1", "60°", "25%", "(" * 100, "\\frac{1}"],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_algebra(expression):
    assert arithmetic.evaluate(expression) is None


def test_letters_have_values_of_their_own():
    values = [arithmetic.evaluate(c) for c in "abcdfghklmnopqrstuvwxyzABCDFGHKLMNOPQRSTUVWXYZ"]
    assert None not in values and len(set(values)) == len(values)


def test_differ_only_claims_differences():
    assert arithmetic.differ("x^2 - 1", "x^2 + 1")
    assert arithmetic.differ("R", "r")
    assert not arithmetic.differ("x^2 - 1", "(x-1)(x+1)")
    assert not arithmetic.differ("5!", "121")


def test_time_is_bounded():
    started = time.perf_counter()
    for text in ("(" * 60 + "1" + ")" * 60, "\\sqrt{" * 17 + "2" + "}" * 17, "x^{x^{x^{x^{x^{x}}}}}", "-" * 119 + "1"):
        arithmetic.evaluate(text)
    assert time.perf_counter() - started < 0.1
