"""A user's environment, `turns.environment: path/to/file.py:NAME`. It runs in processes of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.turns.calls import BadCallError
from trainer.turns.episode import ERROR, FAILED, Environment, Observation, Situation
from trainer.turns.messages import packed, unpacked
from trainer.turns.tool_processes import ToolFailure, ToolProcesses

ROOT = Path(__file__).resolve().parents[2]


class OwnEnvironment(Environment):
    """What a rank calls in place of the user's class."""

    slow = True

    def __init__(self, spec: str, deadline_s: float, python: str = "") -> None:
        """spec: a path that is not absolute is one from the current folder, or from the repository's root,
        where ranks on other machines find it. python: the interpreter that runs it; empty: this one. Raises
        ConfigError if it cannot be loaded, or cannot be used.
        """
        path, _, name = spec.rpartition(":")
        if not Path(path).is_file() and (ROOT / path).is_file():
            path = str(ROOT / path)
        module = "trainer.turns.environment_process"
        arguments = [f"{os.path.abspath(path)}:{name}"]
        self.processes = ToolProcesses(module, arguments, deadline_s, kept=True, python=python)
        about = self.processes.about()
        self.tools = about["tools"]
        self.shows_images = about["shows_images"]
        self.replayable = about["replayable"]
        self.scores = about["scores"]
        if self.shows_images and not self.replayable:
            raise ConfigError(
                f"turns.environment {spec} shows images and is not replayable: the rollout log keeps replies"
                " and texts, and images are made again from them; make it a function of row and replies, or"
                " let it show text alone"
            )

    def answer(self, situation: Situation, replies: Sequence[str]) -> Observation | None:
        """`Environment.answer`. Raises nothing: what fails is said in the observation."""
        try:
            said, images = self._ask("answer", situation, replies)
        except ToolFailure as failure:
            return Observation(f"{FAILED}{failure}")
        if "wrong" in said:
            return Observation(f"{ERROR}{said['wrong']}")
        return Observation(said["text"], images, said["role"]) if said else None

    def score(self, situation: Situation, replies: Sequence[str]) -> float | None:
        """`Environment.score`."""
        try:
            return self._ask("score", situation, replies)[0]["score"]
        except ToolFailure:
            return None

    def _ask(self, what: str, situation: Situation, replies: Sequence[str]) -> tuple[dict[str, Any], list]:
        verdicts = {}
        calls = {}
        for reply in replies:
            verdicts[reply] = situation.verdict(reply)
            calls[reply] = _call_of(situation, reply)
        about = {
            "asks": what,
            "replies": list(replies),
            "seen": [picture.seen for picture in situation.pictures],
            "verdicts": verdicts,
            "calls": calls,
            "cell": situation.cell,
            "row": dict(situation.row),
        }
        images = [picture.image for picture in situation.pictures]
        try:
            said, shown = unpacked(self.processes.ask(packed(about, images)))
        except ValueError:
            raise ToolFailure("the tool said nothing that can be read") from None
        if "failed" in said:
            raise ToolFailure(said["failed"])
        return said, shown


def _call_of(situation: Situation, reply: str) -> tuple[str, Mapping[str, Any]] | str | None:
    """A reply's call as its name and arguments, or what is wrong with it; None if it makes none."""
    try:
        call = situation.call(reply)
    except BadCallError as error:
        return str(error)
    return (call.name, call.arguments) if call else None
