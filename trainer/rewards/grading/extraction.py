"""Finds the answer that counts, the last box inside the answer block, and computes the format reward.

Both take linear time on any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

MAX_TEXT_CHARS = 4_000_000
"""A longer completion counts as one without an answer: no engine writes it, and scanning takes time."""

MAX_BOX_CHARS = 2_000
"""A longer box is wrong: no reference answer is nearly as long, and the limit bounds every later step."""

Found = tuple[str | None, bool]
"""The answer that counts, None without one, and whether it is a hedge."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def answer_block(text: str) -> str | None:
    """Content of the last `<answer>` block after the reasoning, to the end of the text if it was cut.

    Everything up to the last `</think>` is reasoning: an answer block in there does not count.
    """
    if len(text) > MAX_TEXT_CHARS:
        return None
    start = text.rfind("</think>")
    start = text.find("<answer>") if start < 0 else start + len("</think>")
    opening = text.rfind("<answer>", max(start, 0))
    if opening < 0:
        return None
    opening += len("<answer>")
    closing = text.find("</answer>", opening)
    return text[opening:] if closing < 0 else text[opening:closing]


def boxed_contents(text: str) -> list[str]:
    r"""Contents of all complete outermost `\boxed{…}` and `\fbox{…}` in order (`unbox` opens nested ones)."""
    contents = []
    box = _BOX.search(text)
    while box is not None and (end := closing_brace(text, box.end() - 1)) is not None:
        contents.append(text[box.end() : end])
        box = _BOX.search(text, end + 1)
    return contents


_MAX_BRACES = 100_000
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def closing_brace(text: str, opening: int) -> int | None:
    r"""Index of the brace that closes the one at `opening`; `\{` and `\}` do not count.

    None if there is none among as many as are looked at.
    """
    depth = 0
    for brace in islice(_BRACE.finditer(text, opening), _MAX_BRACES):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def unbox(content: str) -> str:
    r"""Takes dollar signs and `\boxed{…}` off a reference answer or a nested box: `$\boxed{5}$` -> `5`."""
    if len(content) > 2 * MAX_BOX_CHARS:
        return content
    for _ in range(4):
        content = content.strip()
        if len(content) > 1 and content[0] == content[-1] == "$" and not content.endswith("\\$"):
            content = content.strip("$").strip()
        inner = boxed_contents(content) if content.startswith(("\\boxed", "\\fbox")) else []
        if len(inner) != 1 or not content.endswith("}"):
            return content
        content = inner[0]
    return content


def final_answer(text: str) -> Found:
    """The answer that counts, and whether it is a hedge: several different boxes in the answer block.

    Returns (None, False) if there is no answer block or no complete box in it.
    """
    block = answer_block(text)
    return last_one(boxed_contents(without_calls(block or "")))


_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)


def without_calls(text: str) -> str:
    """A text without the calls of tools in it: what stands in their arguments is no answer."""
    return _CALL.sub("", text) if "<tool_call>" in text else text


def last_one(answers: Iterable[str]) -> Found:
    """The last of the answers that a text states. Where they differ, it is a hedge."""
    stated = list(dict.fromkeys(answers))
    if len(stated) > _MANY:
        return stated[-1][:MAX_BOX_CHARS], True
    opened = list(map(unbox, stated))
    return (opened[-1] if opened else None), len(set(opened)) > 1


_MANY = 20
"""More spellings than this are several answers, and are not looked at."""


def format_reward(text: str) -> float:
    """1.0 for exactly one think block followed by exactly one answer block and nothing else, else 0.0.

    White space at both ends and between the blocks is accepted.
    """
    text = text.strip() if len(text) <= MAX_TEXT_CHARS else ""
    if not (text.startswith("<think>") and text.endswith("</answer>")):
        return 0.0
    if any(text.count(tag) != 1 for tag in _TAGS):
        return 0.0
    between = text[text.index("</think>") + len("</think>") :]
    answer = between.lstrip().removeprefix("<answer>")
    return float(answer != between.lstrip() and without_calls(answer).strip() != "</answer>")
