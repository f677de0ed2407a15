"""The examples of a reward function and of an environment, as the pages name them."""

from __future__ import annotations

import io
import re

import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.turns.test_built_in_tools import called
from trainer.config import ConfigError, RewardFunction, Rewards, Turns
from trainer.data.schema import Row
from trainer.rewards.scorer import Scorer
from trainer.rewards.trial import try_at_desk, try_at_start
from trainer.turns.environments import environment_of
from trainer.turns.episode import ERROR, SeenPicture, Situation

REWARD = "examples/reward.py:reward"
RULER = "examples/environment.py:Ruler"


@pytest.fixture
def ruler():
    environment = environment_of(Turns(environment=RULER, tool_seconds=30.0))
    yield environment
    environment.processes.close()
    environment_of.cache_clear()


def test_a_number_that_is_nearly_right_earns_half():
    texts = [f"<think>a</think><answer>$\\boxed{{{said}}}$</answer>" for said in ("10", "9.9", "5", "x")]
    with Scorer(Rewards(function=REWARD)) as scorer:
        outcomes = scorer.score(texts, ["10"] * 4, ["number"] * 4)
    assert [outcome.accuracy for outcome in outcomes] == [1.0, 0.5, 0.0, 0.0]


def test_repetition_costs_beside_another_reward():
    functions = (
        RewardFunction(path=REWARD),
        RewardFunction(path="examples/reward.py:repetition", weight=0.5),
    )
    texts = ["<think>a</think><answer>$\\boxed{10}$</answer>"] * 3
    rows = [{"completion_ids": ids} for ids in ([5] * 79, list(range(79)), [5])]
    with Scorer(Rewards(functions=functions)) as scorer:
        outcomes = scorer.score(texts, ["10"] * 3, ["number"] * 3, rows=rows)
    assert [outcome.accuracy for outcome in outcomes] == [pytest.approx(1 - 0.5 * 39 / 40), 1.0, 1.0]


def test_a_call_of_the_tool_shows_the_picture_under_a_grid(ruler):
    picture = Image.new("RGB", (60, 40), "white")
    situation = Situation([SeenPicture(picture, picture.size)], lambda reply: None)
    assert ruler.tools[0]["function"]["name"] == "grid" and ruler.shows_images and not ruler.scores
    observation = ruler.answer(situation, [called("grid", lines=1)])
    assert observation.text == "The picture under 1 lines each way:" and observation.role == "tool"
    (shown,) = observation.images
    assert shown.size == (60, 40)
    assert [shown.getpixel(place) for place in ((30, 5), (5, 20), (5, 5))] == [(255, 0, 0)] * 2 + [
        (255, 255, 255)
    ]
    assert ruler.answer(situation, [called("grid", lines=1), "It is 3."]) is None
    for wrong in (called("grid", lines="many"), "<tool_call>{"):
        assert ruler.answer(situation, [wrong]).text.startswith(ERROR)


def test_both_pass_the_desk():
    tried = try_at_desk(Rewards(function=REWARD), Turns(environment=RULER, tool_seconds=30.0), "", "train")
    assert tried == {"refused": "", "notes": []}


def row_with_a_picture() -> Row:
    file = io.BytesIO()
    Image.new("RGB", (60, 40), "white").save(file, "PNG")
    message = {"role": "user", "content": [{"type": "text", "text": "How many?"}, {"type": "image"}]}
    return Row("a1", "mine", [message], [file.getvalue()], "$\\boxed{3}$", "number", "", {"level": 2})


def test_both_pass_the_start_of_a_run_which_names_the_row_otherwise(tmp_path):
    row = row_with_a_picture()
    turns = Turns(environment=RULER, tool_seconds=30.0)
    try_at_start(Rewards(function=REWARD), turns, row)
    (tmp_path / "mine.py").write_text("def reward(text, reference, level):\n    return level / 0\n")
    with pytest.raises(
        ConfigError, match=r"division by zero \(mine.py:2\), called for row a1 before the run"
    ):
        try_at_start(Rewards(function=f"{tmp_path}/mine.py:reward"), turns, row)


@pytest.mark.parametrize(("page", "spec"), [("rewards", REWARD), ("turns", RULER)])
def test_the_pages_name_them(page, spec):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert spec in text
    for path in re.findall(r"\(\.\./(examples/\w+\.py)\)", text):
        assert (ROOT / path).is_file()
