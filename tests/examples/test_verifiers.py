"""Environments in a Python of their own, and those of the package verifiers in it."""

from __future__ import annotations

import sys

import pytest

from tests.examples.test_openenv import venv_with
from tests.turns.test_built_in_tools import called
from trainer.config import ConfigError, RunConfig, Turns, override, validate
from trainer.turns.environments import environment_of
from trainer.turns.episode import ERROR, FAILED, Environment, Situation

CALLED = """
import os

class Calls:
    def answer(self, situation, replies):
        call = situation.call(replies[-1])
        return f"{os.environ['WHOSE']} {call.name} {call.arguments['number']}" if call else None
"""


def test_an_environment_may_have_another_python_and_reads_calls_without_a_package(tmp_path):
    (tmp_path / "mine.py").write_text(CALLED)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nWHOSE=mine exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    turns = Turns(environment=f"{tmp_path}/mine.py:Calls", python=str(python), tool_seconds=30.0)
    mine = environment_of(turns)
    assert mine.answer(of_row(), [called("add", number=3)]).text == "mine add 3"
    wrong = mine.answer(of_row(), ["<tool_call>{"])
    assert wrong.text == f"{ERROR}the call is not valid JSON", "it need not catch what is wrong with a call"
    assert mine.answer(of_row(), ["It is 3."]) is None
    mine.processes.close()


def test_a_python_that_is_not_there_or_not_needed_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(CALLED)
    with pytest.raises(ConfigError, match=r"turns.python .*/nowhere/python: No such file"):
        environment_of(Turns(environment=f"{tmp_path}/mine.py:Calls", python="/nowhere/python"))
    for kind in ("off", "zoom"):
        config = override(RunConfig(), [f"turns.environment={kind}", "turns.python=/usr/bin/python3"])
        with pytest.raises(ConfigError, match="leave turns.python empty"):
            validate(config)


def of_row() -> Situation:
    row = {"id": "a", "question": "3 + 4?", "reference": "7", "extra": {"more": 2}}
    return Situation([], lambda reply: None, row=row)


MINE = '''
import base64, io
import verifiers as vf
from datasets import Dataset
from PIL import Image
from examples.verifiers_multi_turn import VerifiersEnvironment

ROWS = Dataset.from_list([{"question": "not used", "answer": "not used"}])

def add(first: int, second: int) -> int:
    """Adds two numbers.

    Args:
        first: One.
        second: The other.
    """
    return first + second

def exact(completion, answer, info) -> float:
    return float(answer in str(completion[-1].content)) + float(info["more"])

async def turns(state) -> float:
    return len(state["trajectory"])

class Tools(VerifiersEnvironment):
    def load(self):
        rubric = vf.Rubric(funcs=[exact, turns], weights=[1.0, 0.1])
        return vf.ToolEnv(dataset=ROWS, tools=[add], rubric=rubric, system_prompt="not used")

class Asks(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["left"] = 3

    async def env_response(self, messages, state):
        said = messages[-1].content
        state["left"] -= 1
        if said == "broken":
            raise vf.ToolCallError("a tool broke")
        if said == "nobody":
            return [vf.AssistantMessage(content="no")]
        if said != "picture":
            return [vf.UserMessage(content=f"{said}? {state['left']} left.")]
        file = io.BytesIO()
        Image.new("RGB", (20, 30), "red").save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        image = {"type": "image_url", "image_url": {"url": url}}
        return [vf.UserMessage(content=[{"type": "text", "text": "Look:"}, image])]

    @vf.stop
    async def over(self, state):
        steps = state["trajectory"]
        return state["left"] == 0 or bool(steps) and steps[-1]["completion"][-1].content == "stop"

class Game(VerifiersEnvironment):
    shows_images = True
    def load(self):
        return Asks(dataset=ROWS, rubric=vf.Rubric(funcs=[turns]))

class Single(VerifiersEnvironment):
    def load(self):
        return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[exact]))
'''


@pytest.mark.long
@pytest.mark.timeout(900)
def test_environments_of_verifiers_in_their_own_python(tmp_path):
    python = venv_with(tmp_path / "venv", "verifiers==0.2.1", "pillow")
    (tmp_path / "mine.py").write_text(MINE)

    def environment(name):
        return environment_of(
            Turns(environment=f"{tmp_path}/mine.py:{name}", python=python, tool_seconds=30.0)
        )

    tools = environment("Tools")
    (tool,) = tools.tools
    assert tool["function"]["name"] == "add" and set(tool["function"]["parameters"]["properties"]) == {
        "first",
        "second",
    }
    added = called("add", first=3, second=4)
    assert told(tools, added) == ("7", "tool")
    assert told(tools, "<tool_call>{", called("add", first=1, second=4)) == ("5", "tool")
    wrong = tools.answer(of_row(), ["<tool_call>{"]).text
    assert wrong == f"{ERROR}the call is not valid JSON"
    assert "unsupported operand" in tools.answer(of_row(), [called("add", first=1, second="x")]).text
    assert tools.answer(of_row(), [added, "It is 7."]) is None
    assert tools.score(of_row(), [added, "It is 7."]) == pytest.approx(3.2)
    assert tools.score(of_row(), [added, added]) == pytest.approx(2.2), "cut off by turns.limit"

    game = environment("Game")
    assert game.tools == [] and told(game, "a") == ("a? 2 left.", "user")
    assert told(game, "a", "b") == ("b? 1 left.", "user")
    assert game.answer(of_row(), ["a", "stop"]) is None and game.score(of_row(), ["a", "stop"]) == 2.0
    assert told(game, "a") == ("a? 2 left.", "user"), "nothing is left of other episodes"
    looked = game.answer(of_row(), ["picture"])
    assert looked.text == "Look:" and looked.images[0].getpixel((0, 0)) == (255, 0, 0)
    assert game.answer(of_row(), ["broken"]).text == f"{FAILED}ToolCallError: a tool broke"
    assert game.score(of_row(), ["broken", "a"]) is None
    assert "of nobody" in game.answer(of_row(), ["nobody"]).text

    single = environment("Single")
    assert single.answer(of_row(), ["It is 7."]) is None and single.score(of_row(), ["It is 7."]) == 3.0
    for one in (tools, game, single):
        one.processes.close()
    environment_of.cache_clear()


def told(environment: Environment, *replies: str) -> tuple[str, str]:
    observation = environment.answer(of_row(), replies)
    return observation.text, observation.role
