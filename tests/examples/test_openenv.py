"""Environments behind a server of OpenEnv's protocol: a small one here, whatever it says, and a real one."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import threading
from pathlib import Path

import pytest
from PIL import Image
from websockets.sync.server import serve

from examples.packages import uv_program
from tests.servers import free_port, wait_for_port
from tests.turns.test_built_in_tools import called
from trainer.config import ConfigError, Turns
from trainer.turns.environments import environment_of
from trainer.turns.episode import ERROR, FAILED, Situation

MINE = """
from trainer.turns.episode import Environment
from examples.openenv_server import OpenEnv, OpenEnvTools

class Tools(OpenEnvTools):
    url = "http://127.0.0.1:{port}"
    headers = {{"Authorization": "Bearer secret"}}
    shows_images = True

class Graded(Tools):
    score = Environment.score

class Words(OpenEnv):
    url = "ws://127.0.0.1:{port}"
    def action(self, situation, reply):
        return None if reply == "done" else {{"word": reply}}
    def shown(self, observation):
        return observation["said"]
"""


def result(text: str) -> dict:
    return {"tool_name": "t", "error": None, "result": {"content": [{"type": "text", "text": text}]}}


def picture() -> str:
    file = io.BytesIO()
    Image.new("RGB", (20, 30), "red").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class Server:
    """Counts, from the last digit of its seed; each connection is a session."""

    def __init__(self) -> None:
        self.sessions = self.steps = 0
        self.server = serve(self.session, "127.0.0.1", 0)
        self.port = self.server.socket.getsockname()[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def session(self, connection) -> None:
        self.sessions += 1
        count = None
        for message in connection:
            asked = json.loads(message)
            if asked["type"] == "reset":
                count = asked["data"]["seed"] % 10
                connection.send(self.said(result("ready")))
                continue
            self.steps += 1
            action = asked["data"]
            if action.get("type") == "list_tools":
                assert connection.request.headers["Authorization"] == "Bearer secret"
                schema = {"type": "object", "properties": {"number": {"type": "integer"}}}
                tool = {"name": "add", "description": "Adds.", "input_schema": schema}
                connection.send(self.said({"tools": [tool]}))
            elif "word" in action:
                right = "boxed{3}" in action["word"]
                said = {"said": action["word"][::-1]}
                connection.send(self.said(said, reward=float(right), done=right))
            else:
                count += 1
                connection.send(self.reply(action["arguments"].get("number"), count))

    def reply(self, number, count: int) -> str:
        match number:
            case "picture":
                content = [{"type": "text", "text": "Look:"}, {"type": "image", "data": picture()}]
                return self.said({"error": None, "result": {"content": content}})
            case "wrong":
                return self.said({"error": {"message": "no such number"}, "result": None})
            case "error":
                return json.dumps({"type": "error", "data": {"message": "broken"}})
            case "none of it":
                return "[1]"
            case "no number":
                return self.said(result("x"), reward="much")
            case "nan":
                return self.said(result("x"), reward=float("nan"))
            case "long":
                return self.said(result("x" * 30_000))
            case "dice":
                return self.said(result(str(self.sessions)))
            case "end":
                return self.said(result("the end"), reward=2, done=True)
        return self.said(result(f"count {count}"), reward=0.5)

    @staticmethod
    def said(observation, reward=None, done=False) -> str:
        data = {"observation": observation, "reward": reward, "done": done}
        return json.dumps({"type": "observation", "data": data})


@pytest.fixture
def server():
    started = Server()
    yield started
    started.server.shutdown()


@pytest.fixture
def own(server, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE.format(port=server.port))
    made = []

    def environment(name="Tools"):
        made.append(environment_of(Turns(environment=f"{file}:{name}", tool_seconds=30.0)))
        return made[-1]

    yield environment
    for one in made:
        one.processes.close()
    environment_of.cache_clear()


def of_row(name: str = "a") -> Situation:
    return Situation([], lambda reply: None, row={"id": name})


def add(number) -> str:
    return called("add", number=number)


def test_a_call_is_a_step_and_earlier_replies_are_played_again(own, server):
    tools = own()
    assert [tool["function"]["name"] for tool in tools.tools] == ["add"] and tools.scores
    first = tools.answer(of_row(), [add(1)]).text
    start = int(first.removeprefix("count "))
    assert tools.answer(of_row(), [add(1)]).text == first, "the same row has the same seed"
    starts = {tools.answer(of_row(name), [add(1)]).text for name in "bcdef"}
    assert starts != {first}, "another row has another"
    third = tools.answer(of_row(), [add(1), "<tool_call>{", add(1), add(1)])
    assert third.text == f"count {start + 2}", "what the server never saw is not played"
    steps = server.steps
    assert tools.answer(of_row(), [add(1), "It is 3."]) is None and server.steps == steps
    assert tools.score(of_row(), [add(1), add(1), "It is 3."]) == 1.0
    assert tools.answer(of_row(), [add("end")]) is None, "the server's end is the episode's"
    assert tools.score(of_row(), [add(1), add("end")]) == 2.5
    assert not own("Graded").scores


def test_replies_without_tools_are_actions(own):
    words = own("Words")
    assert words.tools == [] and words.answer(of_row(), ["abc", "de"]).text == "ed"
    assert words.answer(of_row(), ["abc", "done"]) is None


WRONG = [
    ("<tool_call>{", ERROR, "not valid JSON"),
    (called("subtract"), ERROR, "there is no tool 'subtract', only add"),
    (add("wrong"), ERROR, "no such number"),
    (add("error"), FAILED, "the server says broken"),
    (add("none of it"), FAILED, "TypeError"),
    (add("no number"), FAILED, "reward is 'much'"),
    (add("long"), FAILED, "30000 characters"),
]


def test_what_a_server_does_wrong_is_an_observation(own):
    tools = own()
    for reply, begins, what in WRONG:
        told = tools.answer(of_row(), [reply]).text
        assert told.startswith(begins) and what in told


def test_images_scores_and_a_server_that_is_not_a_function(own, server):
    tools = own()
    looked = tools.answer(of_row(), [add("picture")])
    assert looked.text == "Look:" and looked.images[0].getpixel((0, 0)) == (255, 0, 0)
    assert tools.score(of_row(), [add("nan")]) is None
    assert not tools.answer(of_row(), [add("dice")]).text.startswith(FAILED)
    again = tools.answer(of_row(), [add("dice"), add(1)]).text
    assert again.startswith(FAILED) and "another thing" in again


def test_a_server_that_is_gone_is_said_at_the_start_and_in_an_observation(own, server):
    tools = own()
    server.server.shutdown()
    told = tools.answer(of_row(), [add(1)]).text
    assert told.startswith(FAILED) and "Refused" in told
    with pytest.raises(ConfigError, match=r"turns.environment .*Refused"):
        own("Graded")


REAL = """
import sys
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import State

class Counter(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("counter")
        self.count = 0

        @mcp.tool
        def add(number: int) -> str:
            "Adds a number to the count."
            self.count += number
            return f"The count is {self.count}."

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count = seed % 10
        return CallToolObservation(tool_name="", result=None)

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise NotImplementedError

    async def step_async(self, action, timeout_s=None, **kwargs):
        said = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        said.reward = 0.25 * self.count
        said.done = self.count > 30
        return said

    @property
    def state(self):
        return State(step_count=0)

app = create_app(Counter, CallToolAction, CallToolObservation, env_name="counter", max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


def venv_with(folder: Path, *packages: str) -> str:
    """The Python of a new virtual environment. The test is skipped where they cannot be fetched."""
    python = str(folder / "bin" / "python")
    uv = uv_program()
    subprocess.run([uv, "venv", "--quiet", "--python", "3.11", folder], check=True)
    done = subprocess.run(
        [uv, "pip", "install", "--quiet", "--python", python, *packages], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"needs {', '.join(packages)}: {done.stderr.decode()[-300:]}")
    return python


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_a_server_of_openenv_itself(tmp_path, monkeypatch):
    python = venv_with(tmp_path / "venv", "openenv==0.10.0")
    (tmp_path / "server.py").write_text(REAL)
    port = free_port()
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen([python, tmp_path / "server.py", str(port)], stdout=file, stderr=file)
    try:
        wait_for_port(port, server, timeout_s=900)
        monkeypatch.setitem(os.environ, "OPENENV_URL", f"http://127.0.0.1:{port}")
        tools = environment_of(
            Turns(environment="examples/openenv_server.py:Tools", env="OPENENV_URL", tool_seconds=30.0)
        )
        first = tools.answer(of_row(), [add(3)]).text
        start = int(first.removeprefix("The count is ").removesuffix(".")) - 3
        assert tools.tools[0]["function"]["parameters"]["properties"] == {"number": {"type": "integer"}}
        assert tools.answer(of_row(), [add(3), add(4)]).text == f"The count is {start + 7}."
        assert tools.score(of_row(), [add(3), add(4), "It is 7."]) == 0.25 * (2 * start + 10)
        assert tools.answer(of_row(), [add(3), add(50)]) is None
        wrong = tools.answer(of_row(), [add("many")]).text
        assert wrong.startswith(ERROR) and "valid integer" in wrong
        tools.processes.close()
    finally:
        environment_of.cache_clear()
        server.terminate()
        server.wait(30)
