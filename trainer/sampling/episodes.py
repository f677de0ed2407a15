"""Episodes under way in one call of an engine: replies that wait for what answers them, beside the engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from trainer.algorithm.traces import Trace
from trainer.config import Split
from trainer.data.dialog import Dialogs, Grown, Shown
from trainer.turns.episode import Observation

LOOK_S = 1.0
"""Between two signs of life of an engine that waits for a tool."""


class EngineRanks(Protocol):
    """The ranks of an engine, as vLLM has them."""

    world_size: int

    @property
    def is_first_rank(self) -> bool: ...

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """The object of rank `src`."""


@dataclass(frozen=True, eq=False)
class ToolCall:
    """A call of a slow tool that is under way."""

    due: int
    """Engine step at which its result is taken."""
    result: Future[Any] | None
    """None on the ranks of an engine that get what the first one has."""
    then: Callable[[Any], None]
    """Takes the result."""


class Episodes:
    """Where an engine brings the replies that have ended, and takes them back, answered.

    A tool that takes milliseconds runs at once. A slow one runs in a thread, `turns.tool_workers` at a time,
    while the engine goes on with other completions for `turns.tool_steps` steps. Then its result is taken, no
    sooner and no later: which completions share a step, and so the last bits of what is computed, does not
    depend on time.
    """

    def __init__(
        self, dialogs: Dialogs, split: Split, max_tokens: int, alive: Callable[[], None] = lambda: None
    ) -> None:
        """max_tokens: most tokens behind a prompt. alive: called while the engine waits."""
        self.slow = dialogs.environment.slow
        self._dialogs = dialogs
        self._split = split
        self._max_tokens = max_tokens
        self._alive = alive
        self._step = 0
        self._grown: list[Grown] = []
        self._calls: deque[ToolCall] = deque()
        self._ranks: EngineRanks | None = None
        self._lock = threading.Lock()
        self.tool_s = 0.0
        """Time that slow tools took, calls added up."""
        self.waited_s = 0.0
        """Time that the engine stood still until their results were there."""
        self._threads = ThreadPoolExecutor(dialogs.config.turns.tool_workers, "tools") if self.slow else None

    def answered(self, replied: Sequence[Trace], idle: bool, ranks: EngineRanks | None = None) -> list[Grown]:
        """Takes episodes whose last reply has ended in this step of the engine; returns those that go on or
        have ended for good in it. To be called once a step.

        idle: whether the engine has nothing else to do: then it skips to the step in which a result is due.
        ranks: of the engine. All get what the tools say on the first.
        """
        self._ranks = ranks
        self._step += 1
        for trace in replied:
            self._begin(trace)
        while self._calls:
            if self._calls[0].due > self._step:
                if not idle or self._grown:
                    break
                self._step = self._calls[0].due
            call = self._calls.popleft()
            call.then(self._result(call))
        grown, self._grown = self._grown, []
        return grown

    def shown(self, trace: Trace) -> list[Shown]:
        """What an episode that goes on has shown already, made again."""
        return list(self._dialogs.shown(self._split, trace))

    def close(self) -> None:
        """Leaves what waits."""
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, trace: Trace) -> None:
        if trace.end == "cut":  # within a reply, which goes on in the next phase
            self._grown.append(Grown(trace))
            return
        if not self._dialogs.may_go_on(trace):
            self._end(trace)
            return
        situation = self._dialogs.situation(self._split, trace.row)
        replies = [*trace.dialog[::2], trace.text]
        answer = partial(self._dialogs.environment.answer, situation, replies)
        self._call(answer, partial(self._observed, trace))

    def _observed(self, trace: Trace, observation: Observation | None) -> None:
        grown = self._dialogs.grown(self._max_tokens, trace, observation)
        if grown.trace.end == "cut":
            self._grown.append(grown)
        else:
            self._end(grown.trace)

    def _end(self, trace: Trace) -> None:
        if not self._dialogs.environment.scores:
            self._grown.append(Grown(trace))
            return
        situation = self._dialogs.situation(self._split, trace.row)
        score = partial(self._dialogs.environment.score, situation, [*trace.dialog[::2], trace.text])
        self._call(score, partial(self._scored, trace))

    def _scored(self, trace: Trace, score: float | None) -> None:
        self._grown.append(Grown(replace(trace, score=score)))

    def _call(self, tool: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Calls a tool, and `then` with its result, in this step or in the one where it is due."""
        if self._threads is None:
            then(tool())
            return
        first = self._ranks is None or self._ranks.is_first_rank
        result = self._threads.submit(self._timed, tool) if first else None
        self._calls.append(ToolCall(self._step + self._dialogs.config.turns.tool_steps, result, then))

    def _result(self, call: ToolCall) -> Any:
        """Waits for it, on every rank."""
        result = None
        if call.result is not None:
            started = time.monotonic()
            while not wait([call.result], LOOK_S).done:
                self._alive()
            self.waited_s += time.monotonic() - started
            result = call.result.result()
        if self._ranks is None or self._ranks.world_size == 1:
            return result
        return self._ranks.broadcast_object(result, src=0)

    def _timed(self, tool: Callable[[], Any]) -> Any:
        started = time.monotonic()
        result = tool()
        with self._lock:
            self.tool_s += time.monotonic() - started
        return result
