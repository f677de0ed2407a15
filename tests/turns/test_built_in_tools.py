"""Calls of `zoom` by replies that are right, wrong, or meant to do harm: each gets a clear observation."""

from __future__ import annotations

import json
import math
import time

import pytest
from PIL import Image

from trainer.config import Turns
from trainer.turns.calls import call_in
from trainer.turns.environments import environment_of, tools_of
from trainer.turns.episode import ERROR, SeenPicture, Situation
from trainer.turns.zoom import in_original, shown_size

BARE = Situation((), lambda reply: None)


def called(name, **arguments):
    return f"I look.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answered(situation, *replies):
    environment = environment_of(Turns(environment="zoom"))
    assert environment is not None
    return environment.answer(situation, replies)


def test_off_is_one_reply_and_offers_nothing():
    assert environment_of(Turns()) is None and tools_of(Turns()) == []
    assert [tool["function"]["name"] for tool in tools_of(Turns(environment="zoom"))] == ["zoom"]


def situation(width=800, height=600, seen=(392, 280)):
    picture = Image.new("RGB", (width, height))
    for x in range(width):
        for y in range(0, height, 7):
            picture.putpixel((x, y), (x % 256, y % 256, (x * y) % 256))
    return Situation((SeenPicture(picture, seen), SeenPicture(picture.rotate(90), seen)), lambda reply: None)


@pytest.mark.parametrize(
    ("reply", "wrong"),
    [
        ("<tool_call>{bad}</tool_call>", "not valid JSON"),
        ("<tool_call>", "not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": ' + "9" * 5000 + "}</tool_call>", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "a call is an object"),
        ('<tool_call>{"name": ["zoom"]}</tool_call>', "a call is an object"),
        ('<tool_call>{"name": "zoom", "arguments": "1"}</tool_call>', "not an object"),
        ('<tool_call>{"name": "zoom"}</tool_call>', "four numbers"),
        (called("rm " + "x" * 5000), "there is no tool 'rm x"),
        (called("zoom", box=[0, 0, 9, 9]) * 1000, "one call at a time"),
    ],
)
def test_a_malformed_call_is_answered_by_what_is_wrong(reply, wrong):
    observation = answered(situation(16, 16), reply)
    assert observation.text.startswith(ERROR) and wrong in observation.text
    assert len(observation.text) < 300 and observation.role == "tool" and not observation.images


def test_a_million_calls_cost_no_time():
    """They are counted, not parsed; so is a call that is a megabyte long."""
    started = time.monotonic()
    assert "one call at a time" in answered(BARE, called("zoom") * 1_000_000).text
    assert "there is no picture" in answered(BARE, called("zoom", box="1" * 10_000_000)).text
    assert "not valid JSON" in answered(BARE, "<tool_call>" + "{" * 10_000_000).text
    assert time.monotonic() - started < 10


def test_only_a_call_behind_the_reasoning_counts():
    call = called("zoom", box=[0, 0, 50, 50])
    assert answered(situation(), call).images
    assert answered(situation(), f"<think>{call}</think>It is 42.") is None
    assert answered(situation(), "", "It is </tool_call> 42.") is None
    assert answered(situation(), f"<think>Hm.</think>{call}").images
    unclosed = call_in('<tool_call>{"name": "zoom"}')
    assert unclosed is not None and unclosed.name == "zoom"


def test_zoom_shows_the_box_in_pixels_of_what_the_model_saw():
    shown = situation()
    observation = answered(shown, called("zoom", box=[98, 70, 196, 140]))
    (image,) = observation.images
    assert image.size == shown_size((98, 70, 196, 140), 256 * 28 * 28, 28)
    assert observation.text == f"Picture 1, box [98, 70, 196, 140], in {image.width} x {image.height} pixels:"
    original = shown.pictures[0].image.crop((200, 150, 400, 300))
    assert image.tobytes() == original.resize(image.size, Image.Resampling.BICUBIC).tobytes()
    again = answered(shown, "", called("zoom", box=[98, 70, 196, 140], image=2))
    assert again.images[0].tobytes() != image.tobytes(), "the second picture"
    assert in_original((391.5, 279.5, 392, 280), shown.pictures[0])[2:] == (800, 600)


@pytest.mark.parametrize("aspect", [1, 1.3, 0.1, 20, 1 / 20])
@pytest.mark.parametrize("pixels", [28 * 28, 4 * 28 * 28, 256 * 28 * 28])
def test_what_is_shown_has_whole_cells_and_is_bounded(aspect, pixels):
    width, height = shown_size((0, 0, 40 * aspect, 40), pixels, 28)
    assert width % 28 == height % 28 == 0 and 0 < width * height <= pixels


@pytest.mark.parametrize(("box", "wrong"), [
    ([0, 0, 393, 100], "392 pixels wide and 280 high"), ([0, 0, 100, 281], "392 pixels wide and 280 high"),
    ([-1, 0, 100, 100], "not within the picture"), ([1e300, 0, 1.1e300, 100], "numbers of pixels"),
    ([50, 50, 50, 90], "x1 must be less than x2"), ([90, 10, 50, 90], "x1 must be less than x2"),
    ([10, 90, 50, 10], "y1 less than y2"), ([10, 10, 12, 90], "too thin"), ([0, 0, 392, 10], "too thin"),
    ([math.nan, 0, 10, 10], "numbers of pixels"), ([0, 0, math.inf, 10], "numbers of pixels"),
    (["0", 0, 10, 10], "numbers of pixels"), ([True, 0, 10, 10], "numbers of pixels"),
    ([[0], 0, 10, 10], "numbers of pixels"), ([0, 0, 10], "four numbers"), ({"x1": 0}, "four numbers"),
    (None, "four numbers"), ([10**400, 0, 10, 10], "numbers of pixels"),
])  # fmt: skip
def test_a_box_that_is_none_is_refused(box, wrong):
    observation = answered(situation(16, 16), called("zoom", box=box))
    assert observation.text.startswith(ERROR) and wrong in observation.text and not observation.images


@pytest.mark.parametrize("number", [0, 3, -1, 1.0, True, "1", None, 10**30])
def test_a_picture_that_is_none_is_refused(number):
    observation = answered(situation(16, 16), called("zoom", box=[0, 0, 50, 50], image=number))
    assert observation.text == f"{ERROR}there are pictures 1 to 2"
    assert "there is no picture" in answered(BARE, called("zoom", box=[0, 0, 50, 50])).text
