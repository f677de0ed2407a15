"""Nothing that a model can write hangs the grader, takes the memory, harms the rest of a batch or is
rewarded."""

import random
import time

import pytest

from trainer import config
from trainer.rewards.completion_facts import sample_completion as wrap
from trainer.rewards.grading import grader
from trainer.rewards.grading.stated_answers import FORMS
from trainer.rewards.scorer import Scorer

HOSTILE = {
    "tower of powers": "9^{9^{9^{9}}}",
    "tower without braces": "9^9^9",
    "tower of tens": "10^{10^{10}}",
    "factorial of a billion": "(10^9)!",
    "factorial of a factorial": "((20)!)!",
    "200,000 digits": "7" * 200_000,
    "1,500 digits": "7" * 1_500,
    "2,000 open brackets": "(" * 2_000,
    "2,000 nested brackets": "(" * 2_000 + "1" + ")" * 2_000,
    "250 nested brackets": "(" * 250 + "1" + ")" * 250,
    "nested fractions": "\\frac{1}{" * 90 + "2" + "}" * 90,
    "nested roots": "\\sqrt{" * 90 + "2" + "}" * 90,
    "nested powers": "2^{" * 100 + "2" + "}" * 100,
    "nested sets": "\\{" * 100 + "1, 2" + "\\}" * 100,
    "set of 200": "\\{" + ", ".join(map(str, range(200))) + "\\}",
    "NUL bytes": "\0" * 500,
    "NUL inside": "6\x000",
    "huge integral": "\\int_0^{1000} \\int_0^{1000} \\frac{e^{x^{99} y^{98}}}{\\sin(x y)^{97}} dx dy",
    "huge sum": "\\sum_{k=1}^{10^{12}} \\frac{1}{k^2 + \\sin k}",
    "huge product": "\\prod_{k=1}^{1000000} k",
    "huge binomial": "\\binom{10^{9}}{5 \\cdot 10^8}",
    "huge expansion": "(x+y+z+w)^{900} - (x+y+z+w)^{899}",
    "huge exponent": "1e999999999",
    "division by zero": "\\frac{1}{0}",
    "zero to the zero": "0^{0^{0}}",
    "limit": "\\lim_{x \\to 0} \\frac{\\sin(x^{99})}{x^{99}}^{x^{x}}",
    "thousands of backslashes": "\\" * 1_999,
    "dollar signs": "$" * 1_000,
    "commas": "," * 1_000,
    "equals": "=" * 1_000,
    "percent": "%" * 1_000,
    "spaces": " " * 1_500 + "1",
    "lone surrogate": "6\ud8000",
    "emoji": "😀" * 300,
    "right to left": "\u202e06",
    "Arabic digits": "٦٠" * 900,
    "superscripts": "6" + "⁰" * 500,
    "unknown commands": "\\foo{\\bar{\\baz}}" * 30,
    "python": "__import__('os').system('true')",
    "format string": "%s%n{0}{}",
    "letters and underscores": "AA___Axxx__A__xAxAxxA_xxxxxxx_x_x_A_x___Ax_A" * 9,
    "names in brackets": "(x(y(z_a_b(c" * 40 + "=61",
}

PLAIN = [
    ("60", "60", "number"),
    ("A", "(A) 12", "letter"),
    ("\\sin x - 1", "-1 + \\sin x", "math"),
    ("Yes", "yes", "text"),
]


@pytest.fixture(scope="module")
def scorer():
    with Scorer(
        config.Rewards(workers=2, deadline_s=1.0, max_timeout_rate=1.0, max_error_rate=1.0)
    ) as scorer:
        scorer.score([wrap("\\sin x+1")], ["1+\\sin x"], ["math"])  # started and warm
        yield scorer


@pytest.mark.parametrize("reference", ["60", "\\sqrt{3} + x", "(1, 2)"])
def test_hostile_completions_cost_their_deadline_and_nothing_more(scorer, reference):
    kind = grader.classify(reference)
    texts = [wrap(h) for h in HOSTILE.values()] + [wrap(a) for _, a, _ in PLAIN]
    references = [reference] * len(HOSTILE) + [g for g, _, _ in PLAIN]
    kinds = [kind] * len(HOSTILE) + [t for _, _, t in PLAIN]
    started = time.monotonic()
    verdicts = [o.verdict for o in scorer.score(texts, references, kinds)]
    assert [n for n, v in zip(HOSTILE, verdicts, strict=False) if v == "correct"] == []
    assert verdicts[len(HOSTILE) :] == ["correct"] * len(PLAIN)
    assert time.monotonic() - started < 4.0 * len(HOSTILE)


@pytest.mark.parametrize("answer_type", ["letter", "number", "text", "math"])
def test_fast_path_is_bounded_on_hostile_answers(answer_type):
    reference = {"letter": "A", "number": "60", "text": "Yes", "math": "\\{1, 2\\}"}[answer_type]
    for name, content in HOSTILE.items():
        started = time.perf_counter()
        grader.decide_fast(content, reference, answer_type)
        assert time.perf_counter() - started < 0.25, name


PIECES = (
    "\\frac { } ( ) [ ] \\{ \\} , ; . x A _ __ or and \\text{ \\pm \\sqrt ^ = < \\le \\cup \\% $ \\$ ° \\circ"
    " / : \\approx cm sqrt( pi ** \\\\ \\ - + * e 10^ percent degrees \\quad ~ \\! ½ ² answer option \\boxed{"
    " & | not 1,234 0.5 23"
)


@pytest.mark.parametrize(
    "reference", ["60", "B", "Yes", "\\{1, 2\\}", "(1,\\sqrt{2})", "x=1, y=2", "3:4", "[1,2)", "x^2+1"]
)
def test_fast_path_is_bounded_on_random_pieces_of_notation(reference):
    """Regular expressions that backtrack show themselves on long runs of few different pieces."""
    random_ = random.Random(reference)
    pieces = [" ", *PIECES.split(" ")]
    for _ in range(300):
        few = random_.sample(pieces, random_.choice([1, 2, 3, 6]))
        content = "".join(random_.choice(few) for _ in range(random_.choice([20, 200, 900])))
        started = time.thread_time()
        grader.decide_fast(content, reference, grader.classify(reference))
        assert time.thread_time() - started < 0.2, content


@pytest.mark.parametrize("text", [
    "a" * 3_000_000, "<answer>" * 300_000, "\\boxed{" * 300_000,
    "<answer>" + "\\boxed{1}" * 200_000 + "</answer>", "<think>" + "\\boxed{60}" * 200_000 + "</think>",
    "<answer>" + "{" * 2_000_000, "<think></think>" * 150_000,
    "<answer>\\boxed{60}</answer>" + "x" * 8_000_000,
])  # fmt: skip
def test_megabytes_of_text_are_read_in_linear_time(scorer, text):
    started = time.monotonic()
    (outcome,) = scorer.score([text], ["60"], ["number"])
    assert outcome.verdict in ("wrong", "no_answer") and outcome.format == 0.0
    assert time.monotonic() - started < 8.0


def test_hostile_reference_answers_are_reported_at_preparation(scorer):
    references = ["\\sqrt{9^{9^{9^{9}}}}", "x^2", "\\frac{", "(10^9)!", "9^{9^{9^{9}}}"]
    errors = scorer.reference_errors(references, ["math"] * 5)
    assert errors[0] and errors[2] and errors[3]
    assert errors[1] is None and errors[4] is None, "a tower of whole numbers is compared modulo primes"


def test_worker_memory_is_limited(scorer):
    """Powers that fit the deadline but not the memory end as wrong, an error or a timeout, in a worker."""
    (outcome,) = scorer.score([wrap("2^{2^{36}} + x")], ["x"], ["math"])
    assert outcome.verdict in ("wrong", "timeout", "error")


@pytest.mark.parametrize(
    "answer",
    [
        "x + \\sum_{a=1}^{5000} \\sum_{b=1}^{5000} \\sin(a b)",
        "x + \\sum_{a=1}^{4999} \\frac{1}{a} + \\sum_{a=1}^{4999} \\frac{1}{a^2 + \\sin a}",
        "x + \\prod_{a=1}^{60} \\sum_{b=1}^{60} \\sum_{c=1}^{60} c^{99}",
    ],
)
def test_the_terms_of_one_expression_are_bounded_together(answer):
    started = time.thread_time()
    assert grader.decide(answer, "x", "math") == "wrong"
    assert time.thread_time() - started < 1.0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inside", ["7" * 1_000_000, "a{b}" * 250_000, "7}\\boxed{8" * 100_000])
def test_a_megabyte_in_boxes_costs_the_caller_milliseconds(form, inside):
    started = time.thread_time()
    content, hedged = FORMS[form].answer(f"<think>a</think><answer>\\boxed{{{inside}}}</answer>")
    assert grader.decide_fast("" if hedged else content or "", "7", "number") == "wrong"
    assert time.thread_time() - started < 0.5
