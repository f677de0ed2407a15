"""The tools among the examples, as environments of a user's: arithmetic, and a second try."""

from __future__ import annotations

import time

import pytest

from examples.calculator import computed
from examples.second_try import NO_ANSWER, WRONG, Again
from tests.turns.test_built_in_tools import BARE, called
from trainer.config import Turns
from trainer.turns.calls import BadCallError
from trainer.turns.environments import environment_of
from trainer.turns.episode import ERROR, Situation


@pytest.fixture(scope="module")
def calculator():
    environment = environment_of(Turns(environment="examples/calculator.py:Calculator", tool_seconds=60.0))
    yield environment
    environment.processes.close()
    environment_of.cache_clear()


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (called("calculator", expression="6 * 7"), "42"),
        (f"<think>{called('calculator', expression='1')}</think>It is 42.", None),
        (called("calculator", expression="1" * 1_000_000), f"{ERROR}the expression is longer than 200"),
        (called("calculator", expression=["1"]), f'{ERROR}"expression" is not a text'),
        (called("rm"), f"{ERROR}there is no tool 'rm', only calculator"),
        ("<tool_call>{", f"{ERROR}the call is not valid JSON"),
    ],
)
def test_a_call_is_answered(calculator, reply, said):
    observation = calculator.answer(BARE, [reply])
    assert (observation and observation.text[: len(said)]) == said


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 * (2 + 4)", 18),
        ("2 ^ 10 - 1", 1023),
        ("-7 // 2", -4),
        ("sqrt(2) ** 2", 2.0000000000000004),
        ("sin(pi / 6)", 0.5),
        (" 10 % 4\n", 2),
        ("9" * 200, float("9" * 200)),
    ],
)
def test_arithmetic(expression, value):
    assert computed(expression) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(("expression", "wrong"), [
    ("", "cannot be read"), ("1 +", "cannot be read"), ("(" * 150, "cannot be read"),
    ("-" * 200, "cannot be read"), ("~" * 150 + "1", "something else"), ("1 / 0", "division by zero"),
    ("9 ** 9 ** 9 ** 9", "too large"), ("1e999", "too large"), ("exp(1e4)", "too large"),
    ("sqrt(-1)", "no real value"), ("(-8) ** 0.5", "no real value"), ("1\x00", "cannot be read"),
    ("1 if 1 else 2", "something else"), ("'a' * 9", "something else"),
    ("[1] * 999999999", "something else"), ("True + 1", "something else"),
    ("__import__('os').system('true')", "something else"), ("().__class__", "something else"),
    ("(lambda: 1)()", "something else"), ("sqrt(1, 2)", "something else"), ("open(1)", "something else"),
    ("x := 3", "cannot be read"), ("1j", "something else"), ("1" * 201, "longer than 200"),
])  # fmt: skip
def test_what_is_no_arithmetic_is_refused_at_once(expression, wrong):
    started = time.monotonic()
    with pytest.raises(BadCallError, match=wrong):
        computed(expression)
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    ("verdict", "said"),
    [("wrong", WRONG), ("no_answer", NO_ANSWER), ("correct", None), ("error", None), (None, None)],
)
def test_again_tells_a_wrong_answer_once(verdict, said):
    told = Situation((), lambda reply: verdict)
    observation = Again().answer(told, ["It is 4."])
    assert (observation and observation.text) == said and (said is None or observation.role == "user")
    assert Again().answer(told, ["It is 4.", "It is 5."]) is None


@pytest.mark.parametrize(("reference", "answer_type", "question", "guessable"), [
    ("B", "letter", "Which? A. 3 B. 4", True), ("Yes", "text", "Is it even?", True),
    ("triangle", "text", "Is it a triangle or a square?", True), ("4", "number", "How many?", False),
    ("Paris", "text", "Which city is shown?", False),
])  # fmt: skip
def test_again_gives_no_second_guess_where_few_answers_are_left(reference, answer_type, question, guessable):
    row = {"reference": reference, "answer_type": answer_type, "question": question}
    told = Situation((), lambda reply: "wrong", row=row)
    assert (Again().answer(told, ["It is another."]) is None) == guessable
    silent = Situation((), lambda reply: "no_answer", row=row)
    assert Again().answer(silent, ["I see."]) is not None
