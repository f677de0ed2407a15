"""Calls of tools by replies that are right, wrong, or meant to do harm: each gets a clear observation."""

from __future__ import annotations

import json
import math
import time

import pytest
from PIL import Image

from trainer.config import Turns
from trainer.turns.calculator import computed
from trainer.turns.calls import BadCallError, call_in
from trainer.turns.environments import environment_of, tools_of
from trainer.turns.episode import ERROR, SeenPicture, Situation
from trainer.turns.second_try import NO_ANSWER, WRONG
from trainer.turns.zoom import in_original, shown_size

BARE = Situation((), lambda reply: None)


def called(name, **arguments):
    return f"I look.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answered(kind, situation, *replies):
    environment = environment_of(Turns(environment=kind))
    assert environment is not None
    return environment.answer(situation, replies)


def test_off_is_one_reply_and_offers_nothing():
    assert environment_of(Turns()) is None and tools_of(Turns()) == []
    assert [tool["function"]["name"] for tool in tools_of(Turns(environment="zoom"))] == ["zoom"]


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


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("", "cannot be read"),
        ("1 +", "cannot be read"),
        ("(" * 150, "cannot be read"),
        ("-" * 200, "cannot be read"),
        ("~" * 150 + "1", "something else"),
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("1e999", "too large"),
        ("exp(1e4)", "too large"),
        ("sqrt(-1)", "no real value"),
        ("(-8) ** 0.5", "no real value"),
        ("1\x00", "cannot be read"),
        ("1 if 1 else 2", "something else"),
        ("'a' * 9", "something else"),
        ("[1] * 999999999", "something else"),
        ("True + 1", "something else"),
        ("__import__('os').system('true')", "something else"),
        ("().__class__", "something else"),
        ("(lambda: 1)()", "something else"),
        ("sqrt(1, 2)", "something else"),
        ("open(1)", "something else"),
        ("x := 3", "cannot be read"),
        ("1j", "something else"),
        ("1" * 201, "longer than 200"),
    ],
)
def test_what_is_no_arithmetic_is_refused_at_once(expression, wrong):
    started = time.monotonic()
    with pytest.raises(BadCallError, match=wrong):
        computed(expression)
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    ("reply", "wrong"),
    [
        ("<tool_call>{bad}</tool_call>", "not valid JSON"),
        ("<tool_call>", "not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": ' + "9" * 5000 + "}</tool_call>", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "a call is an object"),
        ('<tool_call>{"name": ["zoom"]}</tool_call>', "a call is an object"),
        ('<tool_call>{"name": "calculator", "arguments": "1"}</tool_call>', "not an object"),
        ('<tool_call>{"name": "calculator"}</tool_call>', '"expression" is not a text'),
        (called("calculator", expression=["1"]), '"expression" is not a text'),
        (called("rm " + "x" * 5000), "there is no tool 'rm x"),
        (called("calculator", expression="1") * 1000, "one call at a time"),
    ],
)
def test_a_malformed_call_is_answered_by_what_is_wrong(reply, wrong):
    observation = answered("calculator", BARE, reply)
    assert observation.text.startswith(ERROR) and wrong in observation.text
    assert len(observation.text) < 300 and observation.role == "tool" and not observation.images


def test_a_million_calls_cost_no_time():
    """They are counted, not parsed; so is a call that is a megabyte long."""
    started = time.monotonic()
    reply = called("calculator", expression="1") * 1_000_000
    assert "one call at a time" in answered("calculator", BARE, reply).text
    long = called("calculator", expression="1" * 10_000_000)
    assert "longer than 200 characters" in answered("calculator", BARE, long).text
    assert "not valid JSON" in answered("calculator", BARE, "<tool_call>" + "{" * 10_000_000).text
    assert time.monotonic() - started < 10


def test_only_a_call_behind_the_reasoning_counts():
    call = called("calculator", expression="6 * 7")
    assert answered("calculator", BARE, call).text == "42"
    assert answered("calculator", BARE, f"<think>{call}</think>It is 42.") is None
    assert answered("calculator", BARE, "", "It is </tool_call> 42.") is None
    assert answered("calculator", BARE, f"<think>Hm.</think>{call}").text == "42"
    unclosed = call_in('<tool_call>{"name": "calculator"}')
    assert unclosed is not None and unclosed.name == "calculator"


def situation(width=800, height=600, seen=(392, 280)):
    picture = Image.new("RGB", (width, height))
    for x in range(width):
        for y in range(0, height, 7):
            picture.putpixel((x, y), (x % 256, y % 256, (x * y) % 256))
    return Situation((SeenPicture(picture, seen), SeenPicture(picture.rotate(90), seen)), lambda reply: None)


def test_zoom_shows_the_box_in_pixels_of_what_the_model_saw():
    shown = situation()
    observation = answered("zoom", shown, called("zoom", box=[98, 70, 196, 140]))
    (image,) = observation.images
    assert image.size == shown_size((98, 70, 196, 140), 256 * 28 * 28, 28)
    assert observation.text == f"Picture 1, box [98, 70, 196, 140], in {image.width} x {image.height} pixels:"
    original = shown.pictures[0].image.crop((200, 150, 400, 300))
    assert image.tobytes() == original.resize(image.size, Image.Resampling.BICUBIC).tobytes()
    again = answered("zoom", shown, "", called("zoom", box=[98, 70, 196, 140], image=2))
    assert again.images[0].tobytes() != image.tobytes(), "the second picture"
    assert in_original((391.5, 279.5, 392, 280), shown.pictures[0])[2:] == (800, 600)


@pytest.mark.parametrize("aspect", [1, 1.3, 0.1, 20, 1 / 20])
@pytest.mark.parametrize("pixels", [28 * 28, 4 * 28 * 28, 256 * 28 * 28])
def test_what_is_shown_has_whole_cells_and_is_bounded(aspect, pixels):
    width, height = shown_size((0, 0, 40 * aspect, 40), pixels, 28)
    assert width % 28 == height % 28 == 0 and 0 < width * height <= pixels


@pytest.mark.parametrize(
    ("box", "wrong"),
    [
        ([0, 0, 393, 100], "392 pixels wide and 280 high"),
        ([0, 0, 100, 281], "392 pixels wide and 280 high"),
        ([-1, 0, 100, 100], "not within the picture"),
        ([1e300, 0, 1.1e300, 100], "numbers of pixels"),
        ([50, 50, 50, 90], "x1 must be less than x2"),
        ([90, 10, 50, 90], "x1 must be less than x2"),
        ([10, 90, 50, 10], "y1 less than y2"),
        ([10, 10, 12, 90], "too thin"),
        ([0, 0, 392, 10], "too thin"),
        ([math.nan, 0, 10, 10], "numbers of pixels"),
        ([0, 0, math.inf, 10], "numbers of pixels"),
        (["0", 0, 10, 10], "numbers of pixels"),
        ([True, 0, 10, 10], "numbers of pixels"),
        ([[0], 0, 10, 10], "numbers of pixels"),
        ([0, 0, 10], "four numbers"),
        ({"x1": 0}, "four numbers"),
        (None, "four numbers"),
        ([10**400, 0, 10, 10], "numbers of pixels"),
    ],
)
def test_a_box_that_is_none_is_refused(box, wrong):
    observation = answered("zoom", situation(16, 16), called("zoom", box=box))
    assert observation.text.startswith(ERROR) and wrong in observation.text and not observation.images


@pytest.mark.parametrize("number", [0, 3, -1, 1.0, True, "1", None, 10**30])
def test_a_picture_that_is_none_is_refused(number):
    observation = answered("zoom", situation(16, 16), called("zoom", box=[0, 0, 50, 50], image=number))
    assert observation.text == f"{ERROR}there are pictures 1 to 2"
    assert "there is no picture" in answered("zoom", BARE, called("zoom", box=[0, 0, 50, 50])).text


@pytest.mark.parametrize(
    ("verdict", "said"),
    [("wrong", WRONG), ("no_answer", NO_ANSWER), ("correct", None), ("error", None), (None, None)],
)
def test_again_tells_a_wrong_answer_once(verdict, said):
    told = Situation((), lambda reply: verdict)
    observation = answered("again", told, "It is 4.")
    assert (observation and observation.text) == said and (said is None or observation.role == "user")
    assert answered("again", told, "It is 4.", "It is 5.") is None


@pytest.mark.parametrize(
    ("reference", "answer_type", "question", "guessable"),
    [
        ("B", "letter", "Which? A. 3 B. 4", True),
        ("Yes", "text", "Is it even?", True),
        ("triangle", "text", "Is it a triangle or a square?", True),
        ("4", "number", "How many?", False),
        ("Paris", "text", "Which city is shown?", False),
    ],
)
def test_again_gives_no_second_guess_where_few_answers_are_left(reference, answer_type, question, guessable):
    row = {"reference": reference, "answer_type": answer_type, "question": question}
    told = Situation((), lambda reply: "wrong", row=row)
    assert (answered("again", told, "It is another.") is None) == guessable
    silent = Situation((), lambda reply: "no_answer", row=row)
    assert answered("again", silent, "I see.") is not None
