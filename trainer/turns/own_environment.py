"""A user's environment, `turns.environment: path/to/file.py:NAME`. It runs in processes of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config import ConfigError, Turns
from trainer.system.backoff import Backoff
from trainer.system.own_file import own_path
from trainer.system.process_set import Crashed, Guard, ProcessSet, SetClosed, TookTooMuch, handed_on
from trainer.system.server_waits import waiting_for
from trainer.turns.calls import BadCallError
from trainer.turns.episode import ERROR, FAILED, Environment, Observation, Situation
from trainer.turns.messages import packed, unpacked

REPLAYS = Backoff(attempts=3, patience_s=600.0)
"""Tries of an answer whose picture a learner makes again: it was given once, so it is waited for."""
REPLAY_S = 60.0
"""Least time for such an answer."""


MOST_BYTES = 2 << 30
"""Memory that a process may take for one call."""


class ToolFailure(Exception):
    """What became of a call, for the model to read."""

    def __init__(self, reason: str, fault: str = "") -> None:
        """fault: the same for a person, with file and line."""
        super().__init__(reason)
        self.fault = fault or reason


class OwnEnvironment(Environment):
    """What a rank calls in place of the user's class."""

    slow = True

    def __init__(self, turns: Turns) -> None:
        """Raises ConfigError if it cannot be loaded, or cannot be used."""
        self.spec = spec = turns.environment
        self.path = f"{own_path(spec)}:{spec.rpartition(':')[2]}"
        guard = Guard(
            maker="trainer.turns.environment_process:ServedEnvironment",
            arguments=[self.path],
            key="turns.environment",
            most_bytes=MOST_BYTES,
            environment=handed_on(turns.env),
            python=turns.python,
        )
        self.deadline_s = turns.tool_seconds
        self.processes = ProcessSet(guard)
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
            return self.answer_or_fail(situation, replies)
        except ToolFailure as failure:
            return Observation(f"{FAILED}{failure}")

    def answer_again(self, situation: Situation, replies: Sequence[str]) -> Observation | None:
        """`Environment.answer_again`: a tool that fails now is asked again, for as long as REPLAYS says."""
        deadline_s = max(REPLAY_S, self.deadline_s)
        limit_s = REPLAYS.patience_s + deadline_s
        with waiting_for(
            "grading", f"turns.environment {self.spec}, to show a picture again", limit_s
        ) as waiter:
            return REPLAYS.call(
                lambda: self.answer_or_fail(situation, replies, deadline_s),
                lambda error: isinstance(error, ToolFailure),
                lambda error, *_: waiter.failed(str(error)),
            )

    def answer_or_fail(
        self, situation: Situation, replies: Sequence[str], deadline_s: float = 0.0
    ) -> Observation | None:
        """As `answer`; raises ToolFailure instead of saying it."""
        reply, images = self._ask("answer", situation, replies, deadline_s)
        if "wrong" in reply:
            return Observation(f"{ERROR}{reply['wrong']}")
        return Observation(reply["text"], images, reply["role"]) if reply else None

    def score(self, situation: Situation, replies: Sequence[str]) -> float | None:
        """`Environment.score`."""
        try:
            return self.score_or_fail(situation, replies)
        except ToolFailure:
            return None

    def score_or_fail(self, situation: Situation, replies: Sequence[str]) -> float:
        """As `score`; raises ToolFailure."""
        return self._ask("score", situation, replies)[0]["score"]

    def _ask(
        self, asks: str, situation: Situation, replies: Sequence[str], deadline_s: float = 0.0
    ) -> tuple[dict[str, Any], list]:
        verdicts = {}
        calls = {}
        for reply in replies:
            verdicts[reply] = situation.verdict(reply)
            calls[reply] = _call_of(situation, reply)
        about = {
            "asks": asks,
            "replies": list(replies),
            "seen": [picture.seen for picture in situation.pictures],
            "verdicts": verdicts,
            "calls": calls,
            "cell": situation.cell,
            "row": dict(situation.row),
        }
        images = [picture.image for picture in situation.pictures]
        deadline_s = deadline_s or self.deadline_s
        try:
            answer, shown = unpacked(self.processes.ask(packed(about, images), deadline_s))
        except TimeoutError:
            raise ToolFailure(f"no result within {deadline_s:g} seconds") from None
        except TookTooMuch:
            raise ToolFailure(f"it took more than {MOST_BYTES / 2**30:g} GiB of memory") from None
        except (Crashed, SetClosed):
            raise ToolFailure("the tool crashed") from None
        except ValueError:
            raise ToolFailure("the tool said nothing that can be read") from None
        if "failed" in answer:
            raise ToolFailure(answer["failed"], answer["fault"])
        return answer, shown


def _call_of(situation: Situation, reply: str) -> tuple[str, Mapping[str, Any]] | str | None:
    """A reply's call as its name and arguments, or what is wrong with it; None if it makes none."""
    try:
        call = situation.call(reply)
    except BadCallError as error:
        return str(error)
    return (call.name, call.arguments) if call else None
