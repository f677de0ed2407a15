"""What holds for whole classes of answers: a changed answer is wrong, another spelling of the same value is
right.

The reference answers are of the kinds that MathV60K, MATH, OlympiadBench and college textbooks have.
"""

import random
import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.rewards.grading import grader

ROWS = [line.split("\t") for line in (Path(__file__).parent / "references.tsv").read_text().splitlines()[1:]]
NUMBERS, EXPRESSIONS, STRUCTURES = (
    [r for kind, r in ROWS if kind == wanted] for wanted in ("number", "expression", "structure")
)
ALL = NUMBERS + EXPRESSIONS + STRUCTURES
SAME_UNITS = ({"J", "N m"}, {"mL", "cm^3"})
UNITS_TEXT = (
    "mm cm m km s min h kg g m/s km/h m/s^2 cm^2 m^2 cm^3 L mL N J W kW V mV A \\Omega Hz ° °C dollars "
    "cents N~m Pa mol"
)
UNITS = [unit.replace("~", " ") for unit in UNITS_TEXT.split()]


def verdict(answer: str, reference: str, question: str = "") -> str:
    return grader.decide(answer, reference, grader.classify(reference), question)


def is_number(reference: str) -> bool:
    return grader.classify(reference) == "number"


@pytest.mark.parametrize("reference", ALL)
def test_reference_answer_is_usable_and_equals_itself(reference):
    assert grader.reference_error(reference, grader.classify(reference)) is None
    assert verdict(reference, reference) == "correct"


def letters(text: str) -> list[int]:
    """Positions of letters that are variables: not of a command, a word, e or i."""
    without = re.sub(r"\\[a-zA-Z]+(?:\{[pb]?matrix\})?|[a-zA-Z]{3,}", lambda m: "\0" * len(m[0]), text)
    return [i for i, c in enumerate(without) if c.isalpha() and c not in "eEiIjJ"]


@pytest.mark.parametrize("reference", [r for r in EXPRESSIONS + STRUCTURES if letters(r)])
def test_swapping_the_case_of_a_letter_is_wrong(reference):
    for at in letters(reference):
        changed = reference[:at] + reference[at].swapcase() + reference[at + 1 :]
        if "\\in" not in reference and "\\mid" not in reference:  # a bound variable may have any name
            assert verdict(changed, reference) == "wrong", changed


@pytest.mark.parametrize("reference", [r for r in EXPRESSIONS + STRUCTURES if "'" in r])
def test_dropping_or_adding_a_prime_is_wrong(reference):
    for match in re.finditer("'", reference):
        assert verdict(reference[: match.start()] + reference[match.end() :], reference) == "wrong"
        assert verdict(reference[: match.start()] + "'" + reference[match.start() :], reference) == "wrong"


def digits(reference: str) -> list[int]:
    return [m.start() for m in re.finditer(r"[0-9]", reference)]


@pytest.mark.parametrize("reference", [r for r in ALL if digits(r)])
def test_changing_one_digit_is_wrong(reference):
    for at in digits(reference):
        for digit in "0123456789":
            changed = reference[:at] + digit + reference[at + 1 :]
            if digit != reference[at]:
                assert verdict(changed, reference) != "correct", changed


@pytest.mark.parametrize("reference", [r for r in ALL if re.search(r"[-+<>]", r) or is_number(r)])
def test_changing_a_sign_is_wrong(reference):
    flip = {"-": "+", "+": "-", "<": ">", ">": "<"}
    for match in re.finditer(r"(?<!\^\{)[-+<>](?!1\})", reference):
        if match[0] + reference[match.end() : match.end() + 6] == "-\\infty":
            continue
        assert (
            verdict(reference[: match.start()] + flip[match[0]] + reference[match.end() :], reference)
            == "wrong"
        )
    if is_number(reference):
        assert verdict(reference[1:] if reference[0] == "-" else "-" + reference, reference) == "wrong"


@pytest.mark.parametrize("unit", UNITS)
def test_changing_a_unit_is_wrong(unit):
    for other in UNITS:
        expected = "correct" if unit == other or {unit, other} in SAME_UNITS else "wrong"
        assert verdict(f"12 \\text{{ {other}}}", f"12 \\text{{ {unit}}}") == expected, other
        assert verdict(f"12\\pi \\text{{ {other}}}", f"12\\pi \\text{{ {unit}}}") == expected, other


@pytest.mark.parametrize(
    "reference", ["(1, 2)", "(2, 5, 7)", "[1, 2)", "(\\frac{1}{2}, -3)", "x=2, y=-3", "3:4"]
)
def test_swapping_the_order_is_wrong(reference):
    opening, closing = (reference[0], reference[-1]) if reference[0] in "([" else ("", "")
    separator = ":" if ":" in reference else ","
    parts = [p.strip() for p in reference.removeprefix(opening).removesuffix(closing).split(separator)]
    if "=" in reference:
        values = [p.split("=")[1] for p in parts]
        assert verdict(f"x={values[1]}, y={values[0]}", reference) == "wrong"
    else:
        assert verdict(opening + separator.join(parts[::-1]) + closing, reference) == "wrong"


HEDGES = [
    "{0} or {1}", "{0}, {1}", "{0} = {1}", "{1} = {0}", "\\text{{not }} {0}", "{0} \\text{{ or }} {1}",
    "{0} \\lor {1}", "\\{{{0}, {1}\\}}", "{0} \\neq {1}", "{0} \\text{{ is wrong}}", "\\phantom{{{0}}}",
    "{0} never", "{0} \\mid {1}", "\\text{{wrong: }} {0}", "\\text{{not }} x = {0}", "{0} \\ldots {1}",
    "{0} | {1}", "{0} \\text{{ maybe}}",
]  # fmt: skip


@pytest.mark.parametrize("hedge", HEDGES)
def test_hedges_and_denials_are_wrong(hedge):
    for reference in NUMBERS + EXPRESSIONS:
        assert verdict(hedge.format(reference, "17"), reference) == "wrong", reference


@pytest.mark.parametrize(
    "wrap", ["\\log({0})", "\\sqrt{{{0}}}", "({0})^2", "\\sin({0})", "{0} + 10^{{-30}}", "\\ln({0})"]
)
def test_a_function_of_the_value_is_wrong(wrap):
    for reference in EXPRESSIONS:
        assert verdict(wrap.format(reference), reference) == "wrong", reference
    for reference in ("y = 2x + 1", "F = ma", "x^2 + y^2 = 25", "x > 4", "y = -x", "F < 3ma"):
        left, sign, right = reference.partition(next(c for c in "=<>" if c in reference))
        assert verdict(f"{left}{sign} {wrap.format(right)}", reference) == "wrong", reference


@pytest.mark.parametrize(
    "tail", ["*", "(", ")", "/", "\\cdot", "\\times", "^", "_", "!", "?", "...", "x", "+", "=", "\\%0"]
)
def test_what_is_no_unit_behind_a_number_is_wrong(tail):
    for reference in ("7", "12.5", "\\frac{3}{4}", "5 cm"):
        for text in (f"{reference} {tail}", f"{reference} cm {tail}"):
            assert verdict(text, reference) == "wrong", text


SCALES = (
    "thousand million billion lakh crore dozen hundred k M bn mega elevenths fifty never halves tens not"
    " score"
)


@pytest.mark.parametrize("word", SCALES.split())
def test_words_of_number_scale_and_denial_are_no_units(word):
    for reference in ("5", "12.5", "\\frac{3}{4}"):
        for question in ("", f"How many {word} are there? Is it {word}?"):
            assert verdict(f"{reference} {word}", reference, question) == "wrong"
            assert verdict(f"{reference} \\text{{ {word}}}", reference, question) == "wrong"


LOOKS = (
    "{}", " {} ", "${}$", "\\boxed{{{}}}", "{}.", "\\displaystyle {}", "{}\\,", "\\mathrm{{}}{}", "\\,{}",
    "\\!{}", "{}\\quad", "**{}**", "{} \\phantom{{x}}", "\\hspace{{1cm}}{}", "Q = {}", "y_0 = {}",
)  # fmt: skip
REPLACED = (("\\frac", "\\dfrac"), ("\\frac", "\\tfrac"), (" ", ""), ("-", "−"))


def spellings(value: str) -> list[str]:
    """Other ways to write the same."""
    ways = [look.format(value) for look in LOOKS]
    ways += [value.replace(written, other) for written, other in REPLACED]
    ways += [
        value.replace("\\pi", "π").replace("\\theta", "θ"),
        re.sub(r"\\sqrt\{(\w+)\}", r"√\1", value),
        re.sub(r"\^(\w)(?!\w)", r"^{\1}", value),
        re.sub(r"\\sqrt\{([^{}]*)\}", r"\\sqrt{ \1 }", value),
        value.replace("(", "\\left(").replace(")", "\\right)"),
        "".join(chr(ord(c) + 0xFEE0) if c.isdigit() else c for c in value),
    ]
    if "," not in value:  # (12,500) is a point
        ways += [f"{{{value}}}", f"\\left({value}\\right)", f"\\({value}\\)"]
    if not is_number(value):
        ways += [f"1 \\cdot ({value})", f"({value}) + 0", f"-(-({value}))", f"({value})^1"]
    return ways


@pytest.mark.parametrize("reference", NUMBERS + EXPRESSIONS)
def test_twenty_spellings_of_one_value_are_right(reference):
    ways = spellings(reference)
    assert len(ways) >= 20
    assert [w for w in ways if verdict(w, reference) != "correct"] == []


def polynomial(draw: random.Random) -> tuple[str, str]:
    """A product of factors, and the same multiplied out; coefficients at random."""
    a, b, c, d = (draw.choice([n for n in range(-9, 10) if n]) for _ in range(4))
    x, y = draw.sample("xyzabtuvRHN", 2)
    return f"({a}{x} + {b})({c}{y} + {d})", f"{a * c}{x}{y} + {a * d}{x} + {b * c}{y} + {b * d}".replace(
        "+ -", "- "
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_products_equal_their_expansion_and_nothing_near_it(seed):
    draw = random.Random(seed)
    factors, expansion = polynomial(draw)
    assert verdict(expansion, factors) == "correct" and verdict(factors, expansion) == "correct"
    assert verdict(f"{expansion} + 1", factors) == "wrong"
    assert verdict(f"{expansion} + 10^{{-40}}", factors) == "wrong"
    at = draw.choice(letters(expansion))
    assert verdict(expansion[:at] + expansion[at].swapcase() + expansion[at + 1 :], factors) == "wrong"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.fractions(max_denominator=999), st.sampled_from(["", " cm", " \\text{ kg}", "°"]))
def test_fractions_in_every_spelling(value, unit):
    reference = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    over, under = value.numerator, value.denominator
    ways = [
        f"{over}/{under}",
        f"\\frac{{{2 * over}}}{{{2 * under}}}",
        f"-\\frac{{{-over}}}{{{under}}}",
        f"{over} / {under}",
    ]
    for way in ways:
        assert verdict(way + unit, reference + unit) == "correct", (way, reference)
    wrong = value + 1
    assert verdict(f"{wrong.numerator}/{wrong.denominator}{unit}", reference + unit) == "wrong"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text("0123456789abxyRr+-*/^_{}()[]|<>=,.'!\\ √πfracsqrt", max_size=40), st.sampled_from(ALL))
def test_any_text_gets_a_verdict(text, reference):
    assert verdict(text, reference) in ("correct", "wrong")


TEXTS = (
    "None of the above", "20°C", "x = 5", "Both {0} and {1}", "Vitamin D", "It is not known.", "(1, 2)",
    "3\\sqrt{{2}}", "\\frac{{1}}{{2}}", "x > 2", "all of these", "I and II",
)  # fmt: skip
MARKS = ("({0}) ", "{0}. ", "{0}: ", "\\text{{({0}) }} ")
TAKEN_BACK = (
    "({0}) ({1})", "{0} or {1}", "({0}) or {1}", "{0}. 5 {1}. 6", "{0} = {1}", "({0}), ({1})", "{0}{1}",
    "{0}/{1}", "({0}) {1}",
)  # fmt: skip


@pytest.mark.parametrize("letter", "ABCD")
def test_an_option_is_committed_to_once(letter):
    other = "BCDA"["ABCD".index(letter)]
    for mark, text in product(MARKS, TEXTS):
        way = (mark + text).format(letter, other)
        assert verdict(way, letter) == "correct", way
        assert verdict(way, other) == "wrong", way
    for template in TAKEN_BACK:
        way = template.format(letter, other)
        assert verdict(way, letter) == verdict(way, other) == "wrong", way
