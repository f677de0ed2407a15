import time

import pytest

from trainer.rewards.grading import polynomial


@pytest.mark.parametrize(
    ("first", "second"),
    [("(x-1)(x+1)", "x^2 - 1"), ("2\\sqrt{3}", "\\sqrt{12}"), ("\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}"),
     ("\\sqrt{66} \\cdot 2", "2\\sqrt{66}"), ("57\\pi / 7", "\\frac{57\\pi}{7}"), ("0.5x", "\\frac{x}{2}"),
     ("\\sqrt{\\frac{8}{9}}", "\\frac{2\\sqrt{2}}{3}"), ("\\sqrt{2}\\sqrt{3}", "\\sqrt{6}"),
     ("(1+\\sqrt{2})^2", "3+2\\sqrt{2}"),
     ("\\frac{x}{x+1}", "1 - \\frac{1}{x+1}"), ("x^{-2}", "\\frac{1}{x^2}"), ("\\sqrt{x+1}", "\\sqrt{1+x}"),
     ("0", "x-x"),
     ("\\frac{1}{2+\\sqrt{3}}", "2-\\sqrt{3}"), ("e^2 + e", "e(e+1)"), ("\\sqrt{0}", "0"), ("\\sqrt{16}", "4"),
     ("\\sin(2x) + 3", "3 + \\sin(x+x)"), ("2\\ln{5}\\cos(y)", "\\cos(y) \\cdot \\ln(5) \\cdot 2")],
)  # fmt: skip
def test_equal_expressions_are_proved(first, second):
    assert polynomial.same(first, second)
    assert polynomial.same(second, first)


@pytest.mark.parametrize(
    ("first", "second"),
    [("x", "y"), ("R", "r"), ("\\sqrt{2}", "1.41421356"), ("\\pi", "3.14159265358979"), ("x^2", "x^3"), ("x+1", "x-1"),
     ("\\sqrt{x^2}", "x"), ("2^{99}", "2^{98}"), ("\\sqrt{6}", "\\sqrt{5}"), ("\\sqrt{-1}", "\\sqrt{-1}"),
     ("1/0", "1/0"), ("\\sin x", "\\sin x"), ("x^y", "x^y"),
     ("\\sin(x)", "\\sin(y)"), ("\\sin(x)", "\\cos(x)"), ("\\sin 2x", "\\sin 2x"),
     ("\\sqrt[n]{2}", "\\sqrt[m]{2}"),
     ("1000000000000000000001", "1000000000000000000000")],
)  # fmt: skip
def test_nothing_else_is(first, second):
    assert not polynomial.same(first, second)


@pytest.mark.parametrize(
    "hostile",
    ["(" * 12 + "0.5" + ")^{12}" * 12, "(a+b+c+d+f+g+h)^{12}", "+".join(f"\\frac{{1}}{{x+{i}}}" for i in range(9)),
     "(x+1)^{12}(x+1)^{12}(x+1)^{12}", "\\sqrt{999983}\\sqrt{999979}\\sqrt{999961}", "\\sqrt{" * 15 + "x" + "}" * 15,
     "(1+\\sqrt{2}+\\sqrt{3}+\\sqrt{5}+\\sqrt{7})^{12}", "9" * 100 + "^{12}"],
)  # fmt: skip
def test_time_is_bounded(hostile):
    started = time.process_time()
    polynomial.same(hostile, hostile + "+0")
    assert time.process_time() - started < 0.3
