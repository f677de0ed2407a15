"""Episodes under way in one call of an engine: replies that wait for what answers them, beside the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from trainer.algorithm.traces import Trace
from trainer.config import Split
from trainer.data.dialog import Dialogs, Grown
from trainer.turns.episode import Observation

LOOK_S = 1.0
"""Between two signs of life of an engine that has nothing to do but to wait for tools."""


class EngineRanks(Protocol):
    """The ranks of an engine, as vLLM has them."""

    world_size: int

    @property
    def is_first_rank(self) -> bool: ...

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """The object of rank `src`."""


class Episodes:
    """Where an engine brings the replies that have ended, and takes them back, answered.

    A tool that takes milliseconds runs at once. A slow one runs in a thread, `turns.tool_workers` at a time,
    while the engine goes on with other completions; seeds belong to completions and turns, so that it does
    not matter which of them comes first.
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
        self._grown: list[Grown] = []
        self._waiting: dict[Future[Any], Callable[[Any], None]] = {}
        self._lock = threading.Lock()
        self.tool_s = 0.0
        """Time that slow tools took, calls added up."""
        self._threads = ThreadPoolExecutor(dialogs.config.turns.tool_workers, "tools") if self.slow else None

    def answered(
        self, replied: Sequence[Trace], block: bool, ranks: EngineRanks | None = None
    ) -> list[Grown]:
        """Takes episodes whose last reply has ended; returns those that are answered by now.

        block: whether the engine has nothing else to do: then at least one is waited for, if any waits.
        ranks: of the engine, which must all get the same; where tools are slow, they get what the first has.
        """
        if ranks is None or ranks.world_size == 1 or not self.slow:
            return self._answered(replied, block)
        return ranks.broadcast_object(self._answered(replied, block) if ranks.is_first_rank else None, src=0)

    def _answered(self, replied: Sequence[Trace], block: bool) -> list[Grown]:
        for trace in replied:
            self._begin(trace)
        while self._waiting:
            idle = block and not self._grown
            done, _ = wait(self._waiting, LOOK_S if idle else 0, FIRST_COMPLETED)
            for future in done:
                self._waiting.pop(future)(future.result())
            if not done and not idle:
                break
            self._alive()
        grown, self._grown = self._grown, []
        return sorted(grown, key=lambda one: (one.trace.group, one.trace.index))

    def close(self) -> None:
        """Leaves what waits."""
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, trace: Trace) -> None:
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
        """Calls a tool, and `then` with its result, which this thread does."""
        if self._threads is None:
            then(tool())
        else:
            self._waiting[self._threads.submit(self._timed, tool)] = then

    def _timed(self, tool: Callable[[], Any]) -> Any:
        started = time.monotonic()
        result = tool()
        with self._lock:
            self.tool_s += time.monotonic() - started
        return result
