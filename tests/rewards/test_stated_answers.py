"""Answers in the forms that other prompts and models write, each with completions of the kind."""

from __future__ import annotations

import time

import pytest

from trainer.rewards.grading.extraction import MAX_TEXT_CHARS
from trainer.rewards.grading.grader import grade
from trainer.rewards.grading.stated_answers import FORMS

EASY_R1 = "<think>The sides are 3 and 4, so \\boxed{7} is too long.</think>\nThe hypotenuse is $\\boxed{5}$."
QWEN = "First, $12 \\cdot 8 = 96$. Adding 2 gives\n\n\\[\\boxed{98}\\]"
THINKING = "Let me see. 12 times 8 is 96.\n</think>\n\nThe result is \\boxed{\\frac{1}{2}}."
GSM8K = "She sold 48/2 = 24 clips in May.\nAltogether 48+24 = 72.\n#### 72"
INSTRUCT = "**Step 1** count.\nThe correct answer is **B**."
SENTENCE = "We add them up. The final answer is: $3.5$."
CALL = '<tool_call>{"name": "note", "arguments": {"text": "the answer is \\\\boxed{5}"}}</tool_call>'


@pytest.mark.parametrize(
    ("form", "text", "answer", "hedge", "credit"),
    [
        ("boxed", EASY_R1, "5", False, 1.0),
        ("boxed", QWEN, "98", False, 1.0),
        ("boxed", THINKING, "\\frac{1}{2}", False, 0.0),  # the template opened the block: see the scorer
        ("boxed", "<think>\n" + THINKING, "\\frac{1}{2}", False, 1.0),
        ("boxed", "\\boxed{3} or \\boxed{4}", "4", True, 0.0),
        ("boxed", "\\boxed{3}, so \\boxed{3}", "3", False, 0.0),
        ("boxed", "<think>still at it, \\boxed{3}", None, False, 0.0),
        ("boxed", "no box at all", None, False, 0.0),
        ("boxed", "<think>a</think><think>b</think>\\boxed{1}", "1", False, 0.0),
        ("final", GSM8K, "72", False, 1.0),
        ("final", INSTRUCT, "B", False, 1.0),
        ("final", SENTENCE, "3.5", False, 1.0),
        ("final", "The answer is 4. No: the answer is 5.", "5", True, 0.0),
        ("final", "The answer is 4.\nI am sure.", "4", False, 0.0),
        ("final", "Answer: \\boxed{(2, 3)}", "(2, 3)", False, 1.0),
        ("final", "<think>the answer is 3</think>\nAnswer: 4", "4", False, 1.0),
        ("final", "98", None, False, 0.0),
        ("whole", "B", "B", False, 1.0),
        ("whole", " 12 + 34 = 46\n", "12 + 34 = 46", False, 1.0),
        ("whole", "<think>hm</think> $\\boxed{7}$", "7", False, 1.0),
        ("whole", "80 + 80 = 160.", "80 + 80 = 160", False, 1.0),
        ("whole", "80 + 80 = 160. So, 80", "80 + 80 = 160", True, 0.0),
        ("whole", "5\n6", "5\n6", True, 0.0),
        ("whole", "<think>hm", None, False, 0.0),
        ("whole", "", None, False, 0.0),
        ("whole", "$\\boxed{3}$ or $\\boxed{4}$", "4", True, 1.0),
        ("whole", "S. Korea", "S. Korea", False, 1.0),
        ("whole", "B. I am sure", "B", True, 0.0),
        ("whole", "No. 5", "No. 5", False, 1.0),
        ("final", "The answer is \\boxed{3} or \\boxed{4}.", "4", True, 1.0),
        ("final", "The answer is 12 apples. Thanks.", "12 apples", False, 1.0),
        ("boxed", CALL, None, False, 0.0),
        ("final", CALL, None, False, 0.0),
        ("whole", CALL, None, False, 0.0),
        ("any", CALL, None, False, 0.0),
        ("block", f"<think>a</think><answer>{CALL}</answer>", None, False, 0.0),
        ("block", "<think>a</think><answer>$\\boxed{2}$</answer>", "2", False, 1.0),
        ("block", QWEN, None, False, 0.0),
    ],
)
def test_forms(form, text, answer, hedge, credit):
    assert FORMS[form].answer(text) == (answer, hedge)
    assert FORMS[form].credit(text) == credit


@pytest.mark.parametrize("form", FORMS)
def test_hostile_texts_take_linear_time(form):
    pieces = ("<think>", "\\boxed{", "answer is ", "####", "answer is    \n", "{", "<answer>")
    for text in (*(piece * (500_000 // len(piece)) for piece in pieces), "x" * (MAX_TEXT_CHARS + 1)):
        started = time.thread_time()
        FORMS[form].answer(text)
        FORMS[form].credit(text)
        assert time.thread_time() - started < 2.0, text[:20]  # one that is quadratic takes minutes


def test_one_completion_is_graded_by_the_form_that_is_asked_for():
    assert grade(QWEN, "98", "number") == "no_answer"
    assert grade(QWEN, "98", "number", form="boxed") == "correct"
    assert grade(GSM8K, "72", "number", form="final") == "correct"
    assert grade(INSTRUCT, "C", "letter", form="final") == "wrong"
    assert grade("\\boxed{3} or \\boxed{4}", "4", "number", form="boxed") == "wrong"


@pytest.mark.parametrize(("text", "answer"), [
    (EASY_R1, "5"), (GSM8K, "72"), (INSTRUCT, "B"), ("We look at the angles.\n\n(C)", "(C)"),
    ("It is a prime.\n3.5.", "3.5"), ("<think>\\boxed{1}</think>", None),
])  # fmt: skip
def test_any_finds_the_answers_of_models_that_nobody_told_how(text, answer):
    assert FORMS["any"].answer(text) == (answer, False)
