"""Environments behind a server of OpenEnv's, by its WebSocket protocol: none of its packages is needed.

    --set turns.environment=examples/openenv_server.py:Tools --set turns.env=OPENENV_URL

An environment is a function of row and replies, so each answer opens a session, resets it with a seed of the
row, and plays all replies again. A class of your own names another server, or other actions (docs/turns.md).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trainer.turns.calls import BadCallError, offered
from trainer.turns.episode import ERROR, Environment, Observation, Situation
from trainer.turns.messages import image_of

LARGEST_MESSAGE = 64 << 20
"""Bytes of what a server sends at once."""
REMEMBERED = 4096
"""Answers that are compared with what the server says when they are played again."""


class OpenEnv(Environment):
    """An environment of a server. A subclass says its `url` and what `action` a reply is."""

    url = ""
    """The server: ws://HOST:PORT, or http, or with an s."""
    headers: Mapping[str, str] = {}
    """Sent when a session opens, such as an Authorization."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, ...], str] = {}

    def action(self, situation: Situation, reply: str) -> dict[str, Any] | None:
        """What a reply does, as the server's action; None: nothing, it is the last. Raises BadCallError."""
        raise NotImplementedError(f"{type(self).__name__} has no method `action(situation, reply)`")

    def options(self, situation: Situation) -> dict[str, Any]:
        """What `reset` is given."""
        digest = hashlib.sha256(str(situation.row.get("id")).encode()).digest()
        return {"seed": int.from_bytes(digest[:4], "big") >> 1}

    def shown(self, observation: dict[str, Any]) -> str | Observation:
        """What the model reads of an observation."""
        return json.dumps(observation)

    def answer(self, situation: Situation, replies: Sequence[str]) -> Observation | None:
        """`Environment.answer`. Raises ValueError for a server that says what cannot be, or something else
        than it said before."""
        if self.action(situation, replies[-1]) is None:
            return None
        last = self._played(situation, replies)[-1]
        return None if last["done"] else self._observation(last)

    def score(self, situation: Situation, replies: Sequence[str]) -> float:
        """The sum of the steps' rewards. `score = Environment.score` in a subclass leaves it to the run's
        graders."""
        return sum(float(step["reward"] or 0) for step in self._played(situation, replies))

    def _played(self, situation: Situation, replies: Sequence[str]) -> list[dict[str, Any]]:
        """What the server said to each reply, up to the first that ended the episode."""
        steps = []
        with self._session() as ask:
            ask("reset", self.options(situation))
            for number, reply in enumerate(replies, 1):
                try:
                    action = self.action(situation, reply)
                except BadCallError:  # the model was told; the server never saw it
                    continue
                if action is None:
                    break
                step = ask("step", action)
                steps.append(step)
                if step["done"]:
                    break
                self._compare((str(situation.row.get("id")), *replies[:number]), step)
        return steps

    def _observation(self, step: dict[str, Any]) -> Observation:
        shown = self.shown(step["observation"])
        return Observation(shown) if isinstance(shown, str) else shown

    def _compare(self, played: tuple[str, ...], step: dict[str, Any]) -> None:
        """Raises ValueError where the model was shown something else for the same replies."""
        if not self.replayable:
            return
        text = self._observation(step).text
        if self._shown.setdefault(played, text) != text:
            raise ValueError("the server says another thing than it said to the same replies before")
        if len(self._shown) > REMEMBERED:
            del self._shown[next(iter(self._shown))]

    @contextmanager
    def _session(self) -> Generator[Callable[[str, dict[str, Any]], dict[str, Any]]]:
        """A function that sends a message's type and data to a session of its own, and returns what came."""
        from websockets.sync.client import connect

        scheme, _, place = self.url.partition("://")
        address = f"{scheme.replace('http', 'ws')}://{place.rstrip('/')}/ws"
        with connect(address, additional_headers=self.headers, max_size=LARGEST_MESSAGE) as connection:

            def ask(kind: str, data: dict[str, Any]) -> dict[str, Any]:
                connection.send(json.dumps({"type": kind, "data": data}))
                return _said(connection.recv())

            yield ask


class OpenEnvTools(OpenEnv):
    """A server whose actions are calls of its tools. They are asked for at the start."""

    def __init__(self) -> None:
        super().__init__()
        with self._session() as ask:
            listed = ask("step", {"type": "list_tools"})["observation"].get("tools")
        if not isinstance(listed, list) or not listed:
            raise ValueError(f"the server {self.url} names no tools")
        self.tools = [offered(tool["name"], tool["description"], tool["input_schema"]) for tool in listed]

    def action(self, situation: Situation, reply: str) -> dict[str, Any] | None:
        """`OpenEnv.action`."""
        call = situation.call(reply)
        if call is None:
            return None
        names = [tool["function"]["name"] for tool in self.tools]
        if call.name not in names:
            raise BadCallError(f"there is no tool {call.name[:80]!r}, only {', '.join(names)}")
        return {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}

    def shown(self, observation: dict[str, Any]) -> str | Observation:
        """`OpenEnv.shown`: the tool's result, or why there is none."""
        if observation["error"]:
            return f"{ERROR}{observation['error']['message']}"
        texts, images = [], []
        for part in observation["result"]["content"]:
            match part["type"]:
                case "text":
                    texts.append(part["text"])
                case "image":
                    images.append(image_of(part["data"]))
                case other:
                    raise ValueError(f"the tool gives a part of the type {other!r}")
        return Observation("\n".join(texts), images)


class Tools(OpenEnvTools):
    """The server at OPENENV_URL. Its tools are offered, a call is a step, and the sum of the rewards grades
    the episode; with `score = Environment.score` the run's graders grade the last reply."""

    url = os.environ.get("OPENENV_URL", "ws://127.0.0.1:8000")
    shows_images = True


def _said(message: str | bytes) -> dict[str, Any]:
    """The observation, reward and end of a server's reply. Raises ValueError for anything else."""
    reply = json.loads(message)
    data = reply["data"]
    if reply["type"] == "error":
        raise ValueError(f"the server says {str(data.get('message'))[:200]}")
    observation = data["observation"]
    reward = data["reward"]
    done = data["done"]
    if not isinstance(observation, dict) or not isinstance(done, bool):
        raise ValueError("the server's reply is no observation")
    if not isinstance(reward, int | float | None):
        raise ValueError(f"the server's reward is {str(reward)[:80]!r}")
    return {"observation": observation, "reward": reward, "done": done}
