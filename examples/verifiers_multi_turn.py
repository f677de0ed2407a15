"""Environments of the package `verifiers` 0.2: MultiTurnEnv, ToolEnv and what derives from them.

An environment there drives the model. Here it is asked for one observation at a time: its rollout runs with a
client that gives the replies so far, and stops at the request for the next one, whose new messages are the
observation. The package is imported where a user's class is made, in the Python of `turns.python`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from trainer.turns.calls import MARK, BadCallError, offered
from trainer.turns.episode import Environment, Observation, Situation
from trainer.turns.messages import image_of


class _Asked(Exception):
    """The environment wants another reply than those so far."""

    def __init__(self, messages: Sequence[Any]) -> None:
        super().__init__("it wants another reply")
        self.messages = messages


class VerifiersEnvironment(Environment):
    """An environment of verifiers. A subclass says which, and may say what it is given of a row."""

    def load(self) -> Any:
        """The environment, as `verifiers.load_environment(NAME)` gives it."""
        raise NotImplementedError(f"{type(self).__name__} has no method `load()`")

    def example(self, situation: Situation) -> dict[str, Any]:
        """What stands in the place of a row of the environment's own dataset."""
        row = situation.row
        return {
            "prompt": [{"role": "user", "content": row["question"]}],
            "answer": row["reference"],
            "info": dict(row["extra"]),
            "example_id": 0,
        }

    def __init__(self) -> None:
        from verifiers.clients import OpenAIChatCompletionsClient  # ty: ignore[import-not-found]

        self._environment = self.load()
        self._client = OpenAIChatCompletionsClient(None)  # its requests are answered by `_rolled`
        self._loop = asyncio.new_event_loop()
        tools = self._environment.tool_defs or ()
        self.tools = [offered(tool.name, tool.description, tool.parameters) for tool in tools]

    def answer(self, situation: Situation, replies: Sequence[str]) -> Observation | None:
        """`Environment.answer`. Raises what the environment raises, and ValueError for messages that are no
        observation."""
        self._message(situation, replies[-1])
        try:
            self._loop.run_until_complete(self._rolled(situation, replies))
        except _Asked as asked:
            return _observation(asked.messages)
        return None

    def score(self, situation: Situation, replies: Sequence[str]) -> float:
        """The reward of the environment's rubric, which counts a function that raises as 0. `score =
        Environment.score` in a subclass leaves it to the run's graders."""
        return self._loop.run_until_complete(self._scored(situation, replies))

    async def _scored(self, situation: Situation, replies: Sequence[str]) -> float:
        state = await self._rolled(situation, replies, ends=True)
        await self._environment.rubric.score_rollout(state)
        await self._environment.rubric.cleanup(state)
        return state["reward"]

    async def _rolled(self, situation: Situation, replies: Sequence[str], ends: bool = False) -> Any:
        """The state behind the last reply. ends: where another is wanted, it ends as where a prompt is too
        long. Raises _Asked otherwise."""
        import verifiers as vf  # ty: ignore[import-not-found]

        given = []
        for reply in replies:
            try:
                given.append(self._message(situation, reply))
            except BadCallError:  # the model was told; the environment never saw it
                continue
        given.reverse()

        async def response(prompt: Sequence[Any], **_: Any) -> Any:
            if given:
                return given.pop()
            if ends:
                raise vf.OverlongPromptError("the episode has ended")
            raise _Asked(prompt)

        self._client.get_response = response
        state = await self._environment.rollout(self.example(situation), self._client, "policy")
        if state["error"] is not None:
            raise state["error"]
        return state

    def _message(self, situation: Situation, reply: str) -> Any:
        """A reply as the package's response of a model. Raises BadCallError."""
        from verifiers.types import Response, ResponseMessage, ToolCall  # ty: ignore[import-not-found]

        call = situation.call(reply) if self.tools else None
        calls = None
        if call:
            arguments = json.dumps(call.arguments)
            calls = [ToolCall(id="call", name=call.name, arguments=arguments)]
            reply = reply.partition(MARK)[0]
        ended = "tool_calls" if call else "stop"
        message = ResponseMessage(content=reply, tool_calls=calls, finish_reason=ended, is_truncated=False)
        return Response(id="reply", created=0, model="policy", message=message)


def _observation(messages: Sequence[Any]) -> Observation:
    """The messages behind the last reply as one. Raises ValueError."""
    new: list[Any] = []
    for message in reversed(messages):
        if message["role"] == "assistant":
            break
        new.insert(0, message)
    roles = {message["role"] for message in new}
    if not roles <= {"tool", "user"} or not roles:
        raise ValueError(f"its messages are of {', '.join(sorted(roles)) or 'nobody'}, not of a tool or user")
    texts, images = [], []
    for message in new:
        content = message["content"]
        parts: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            match part["type"]:
                case "text":
                    texts.append(part["text"])
                case "image_url":
                    head, _, encoded = part["image_url"]["url"].partition(";base64,")
                    if not head.startswith("data:image/"):
                        raise ValueError("its message has an image that is no data URL")
                    images.append(image_of(encoded))
                case other:
                    raise ValueError(f"its message has a part of the type {other!r}")
    return Observation("\n".join(texts), images, "tool" if roles == {"tool"} else "user")
