"""Tool calls in a reply: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen's models write
them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MARK = "<tool_call>"
THINK_END = "</think>"
FORM: dict[str, Any] = {
    "version": 1,
    "start_anchor": "<|im_start|>assistant",
    "fields": {
        "content": {"content": "text"},
        "tool_calls": {"open": MARK, "close": "</tool_call>", "content": "json", "repeats": True},
    },
}
"""The form of a reply for the parser of transformers."""
SHOWN = 80
"""Characters of a reply that an observation repeats."""


class BadCallError(Exception):
    """What is wrong with a call, for the model to read."""


@dataclass(frozen=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: Mapping[str, Any]


def call_in(reply: str) -> Call | None:
    """The call that a reply makes behind its reasoning; None if it makes none. Raises BadCallError."""
    text = reply.rpartition(THINK_END)[2]
    if MARK not in text:
        return None
    # Loaded where replies are answered: it takes a second or two.
    from transformers.utils.chat_parsing import parse_response

    if text.count(MARK) > 1:
        raise BadCallError("make one call at a time")
    try:
        (called,) = parse_response(text, FORM, prefix="").get("tool_calls", [None])
    except (ValueError, RecursionError):
        raise BadCallError("the call is not valid JSON") from None
    if not isinstance(called, dict) or not isinstance(called.get("name"), str):
        raise BadCallError('a call is an object with "name" and "arguments"')
    arguments = called.get("arguments", {})
    if not isinstance(arguments, dict):
        raise BadCallError('"arguments" is not an object')
    return Call(called["name"], arguments)


OFFER = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""What Qwen2.5's chat template writes of tools behind the system message."""
SYSTEM = "You are a helpful assistant."
"""The system message that Qwen2.5-VL's template writes where there is none."""


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat whose system message offers tools, for templates that know of none."""
    offer = OFFER.format(schemas="\n".join(json.dumps(tool) for tool in tools))
    first, rest = messages[0], list(messages[1:])
    if first["role"] != "system":
        return [{"role": "system", "content": SYSTEM + offer}, first, *rest]
    content = first["content"]
    if isinstance(content, str):
        return [first | {"content": content + offer}, *rest]
    return [first | {"content": [*content, {"type": "text", "text": offer}]}, *rest]


def offered(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat templates take it. parameters: JSON schema of its arguments."""
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def as_result(text: str) -> tuple[str, str]:
    """What stands before and behind a tool's images, for templates that know of no tools."""
    return f"<tool_response>\n{text}", "\n</tool_response>"
