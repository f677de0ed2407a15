"""Exact objects are compared exactly, however large, small or alike they are."""

import json
import time
from itertools import permutations
from pathlib import Path

import pytest

from trainer.config import Rewards
from trainer.observe.report_page import samples_section
from trainer.rewards.grading import exact, expression, grader
from trainer.rewards.scorer import Scorer

LINES = (Path(__file__).parent / "exact.tsv").read_text().splitlines()[1:]
PAIRS = [line.split("\t") for line in LINES]


@pytest.mark.parametrize(("reference", "answer", "equal"), PAIRS)
def test_pairs_are_told_apart_in_both_directions(reference, answer, equal):
    right = {"0": (False, False), "1": (True, True), "<": (False, True)}[equal]
    for (first, second), same in zip(permutations([reference, answer]), right, strict=True):
        verdict = grader.decide(second, first, grader.classify(first))

        assert verdict == ("correct" if same else "wrong"), (first, second)


def test_table_is_large():
    different = [pair for pair in PAIRS if pair[2] == "0"]
    assert len(different) >= 52 and len(PAIRS) - len(different) >= 40


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("\\sqrt{2}", "\\sqrt{2}+10^{-20000}"),
        ("\\sqrt{2} \\cdot 2^{100000}", "\\sqrt{2} \\cdot 2^{100000} + 1"),
        ("\\sqrt{2} \\cdot 9^{9^9}", "\\sqrt{2} \\cdot 9^{9^9} + 1"),
        ("(10^9)!", "(10^9)! + 1"),
    ],
)
def test_what_no_arithmetic_can_tell_is_an_error(reference, answer):
    assert grader.decide(answer, reference, "math") == "error"


def test_an_answer_that_cannot_be_computed_is_wrong_where_the_reference_can():
    for answer in ("(10^9)!", "9^{9^9} \\sqrt{2}", "\\sqrt{2} \\cdot 2^{100000}"):
        assert grader.decide(answer, "\\sqrt{2}", "math") == "wrong"


def test_symbols_are_drawn_on_both_sides_of_one_and_of_zero():
    points = expression.points(expression.read("x^2 + y"), expression.read("|x|"))
    drawn = [float(point.symbol(name)) for point in points for name in "xyzuvw"]
    sizes = sorted(map(abs, drawn))
    assert sizes[0] < 0.7 and sizes[-1] > 1.4
    assert min(drawn) < 0 < max(drawn)


def test_chains_of_primes_are_what_exponents_need():
    sympy = pytest.importorskip("sympy")
    for ring in exact.PRIMES:
        for level in range(exact.CHAIN):
            at = exact.Residues(ring.largest, level)
            assert sympy.isprime(at.prime)
            if level + 1 < exact.CHAIN:
                assert at.prime == 2 * at.exponents().prime + 1


def test_towers_modulo_primes_are_those_of_whole_numbers():
    text = expression.read("3^{2^{5^{2^{3}}}}")
    exponent = 2 ** (5**8)
    for ring in exact.PRIMES:
        residue = text.value.at(expression.Point(1, "residue", ring))
        assert residue.number == pow(3, exponent, ring.prime)


def test_what_decided_is_told():
    said = {
        ("60", "60", "number"): "exact",
        ("B", "(B)", "letter"): "text",
        ("Yes", "yes", "text"): "text",
        ("x+1", "1+x", "math"): "exact",
        ("\\sqrt{8}", "2\\sqrt{2}", "math"): "points",
        ("(1, \\sqrt{8})", "(1, 2\\sqrt{2})", "math"): "points",
        ("x > y + 1", "2x > 2y + 2", "math"): "exact",
        ("x > \\sqrt{2}y", "2x > \\sqrt{8}y", "math"): "points",
    }
    for (reference, answer, kind), rule in said.items():
        assert grader.judge(answer, reference, kind) == ("correct", rule)
    assert grader.judge("(10^9)!+1", "(10^9)!", "math") == ("error", None)


def test_a_batch_says_how_many_were_decided_by_which_rule(tmp_path):
    answers = [
        ("60", "60"), ("B", "(B)"), ("x+1", "1+x"), ("\\sqrt{8}", "2\\sqrt{2}"), ("\\sqrt{8}", "3"),
        ("5", None),
    ]  # fmt: skip
    texts = [f"\\boxed{{{answer}}}" if answer else "?" for _, answer in answers]
    references = [reference for reference, _ in answers]
    with Scorer(Rewards(answer="boxed", workers=1)) as scorer:
        for _ in range(2):  # the second time from memory
            outcomes = scorer.score(texts, references, [grader.classify(r) for r in references])
            rules = ["exact", "text", "exact", "points", "points", ""]
            assert [outcome.rule for outcome in outcomes] == rules
            shares = {name: round(6 * share) for name, share in scorer.stats().items() if "decided" in name}
            assert shares == {"reward/decided_exact": 2, "reward/decided_points": 2, "reward/decided_text": 1}
    sample = {"step": 1, "verdict": "wrong", "rule": outcomes[4].rule, "completion": texts[4]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    assert "decided by values at points" in samples_section(tmp_path)


def test_exact_arithmetic_of_what_a_box_can_hold_is_quick():
    texts = ["2^{" * 20 + "2" + "}" * 20, "99999! \\cdot 99998!", "\\binom{99999}{50000}"]
    texts += [
        "\\sum_{k=1}^{4999} k^{99}",
        "(\\sum_{k=1}^{900} \\frac{1}{k^{99}})!",
        "9^{" * 4 + "9" + "}" * 4,
    ]
    started = time.thread_time()
    for text in texts:
        grader.decide(text, "x", "math")
    assert time.thread_time() - started < 4.0
