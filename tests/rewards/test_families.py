"""Answers to task families are graded by the family itself, in processes that can be killed."""

import json

import pytest

from tests.task_packages import needed
from trainer import config as c
from trainer.rewards.scorer import Scorer

COUNTDOWN = {
    "family": "countdown",
    "entry": {
        "question": "",
        "answer": "20 + 6 - 4",
        "metadata": {"numbers": [4, 6, 20], "target": 22},
    },
}
CHAIN_SUM = {"family": "chain_sum", "entry": {"question": "", "answer": "1200", "metadata": {}}}


def block(answer: str) -> str:
    return f"<think>so</think><answer>$\\boxed{{{answer}}}$</answer>"


def graded(scorer: Scorer, cases: list[tuple[str, dict]]) -> list[tuple[str, float]]:
    references = [json.dumps(task) for _, task in cases]
    outcomes = scorer.score([text for text, _ in cases], references, ["task"] * len(cases))
    return [(outcome.verdict, round(outcome.accuracy, 3)) for outcome in outcomes]


@pytest.fixture(scope="module")
def scorer():
    needed()
    with Scorer(c.Rewards(workers=1, deadline_s=5.0, max_timeout_rate=1.0, max_error_rate=1.0)) as scorer:
        yield scorer


def test_any_right_answer_counts_and_partial_credit_is_the_family_s(scorer):
    assert graded(
        scorer,
        [
            (block("20 + 6 - 4"), COUNTDOWN),
            (block("6 - 4 + 20"), COUNTDOWN),
            (block("20 + 6"), COUNTDOWN),
            (block("so it is 22"), COUNTDOWN),
            (block("1,200"), CHAIN_SUM),
            (block("+1200.0"), CHAIN_SUM),
            (block("1201"), CHAIN_SUM),
        ],
    ) == [
        ("correct", 1.0),
        ("correct", 1.0),
        ("wrong", 0.05),
        ("wrong", 0.01),
        ("correct", 1.0),
        ("correct", 1.0),
        ("wrong", 0.0),
    ]


def test_the_form_decides_what_the_family_sees(scorer):
    hedge = "<think>so</think><answer>$\\boxed{1200}$ or $\\boxed{1201}$</answer>"
    cases = [("1200", CHAIN_SUM), (hedge, CHAIN_SUM), (block(""), CHAIN_SUM), (block("1" * 5000), CHAIN_SUM)]
    assert graded(scorer, cases) == [("no_answer", 0.0), ("wrong", 0.0), ("wrong", 0.0), ("wrong", 0.0)]
    needed()
    with Scorer(c.Rewards(workers=1, answer="whole")) as whole:
        assert graded(whole, [("1200", CHAIN_SUM), ("1200\n1201", CHAIN_SUM)]) == [
            ("correct", 1.0),
            ("wrong", 0.0),
        ]


def test_an_answer_that_never_ends_is_killed_and_costs_nothing_else(scorer):
    restarts = scorer.stats()["perf/grader_restarts"]
    endless = block("9**9**9**9")
    (first, second, third) = graded(
        scorer, [(block("20 + 6 - 4"), COUNTDOWN), (endless, COUNTDOWN), (block("1200"), CHAIN_SUM)]
    )
    assert first == third == ("correct", 1.0)
    assert second == ("timeout", 0.0)
    assert scorer.stats()["perf/grader_restarts"] == restarts + 1


def test_a_task_that_cannot_be_graded_is_named(scorer):
    wrong = {"family": "countdown", "entry": COUNTDOWN["entry"] | {"answer": "20 + 6"}}
    unknown = {"family": "no_such", "entry": COUNTDOWN["entry"]}
    good, other, broken = scorer.reference_errors(
        [json.dumps(task) for task in (COUNTDOWN, wrong, unknown)], ["task"] * 3
    )
    assert good is None
    assert "0.05 of 1" in other and "ended in error" in broken
    assert graded(scorer, [(block("20 + 6 - 4"), unknown)]) == [("error", 0.0)]
