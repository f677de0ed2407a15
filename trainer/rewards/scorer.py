"""`Rewards`: grades batches of answers; can neither hang nor lose a batch to one answer.

Letters, numbers and words are decided in the calling process, by form and in bounded time. What needs algebra, and
every user function, runs in processes that can be killed (`processes.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trainer import config as configuration
from trainer.algorithm.records import Outcome, Verdict
from trainer.config import ConfigError
from trainer.rewards import remote
from trainer.rewards.grading import grader
from trainer.rewards.grading.extraction import final_answer, format_reward
from trainer.rewards.process_pool import Pool

MAX_REMEMBERED = 100_000
"""Verdicts of algebra kept, so that a group's equal answers are worked out once."""

Graded = tuple[Verdict, float]


class TimeoutRateError(RuntimeError):
    """More answers of one batch timed out than `rewards.max_timeout_rate` allows."""


class Rewards:
    """Grades answers against their labels.

    Thread-safe. Holds no process before the first answer that needs one, unless a user function must be checked.

    Raises:
        ConfigError: the user function cannot be loaded, or function and remote_url are both set.
    """

    def __init__(self, config: configuration.Rewards):
        if config.function and config.remote_url:
            raise ConfigError("rewards.function and rewards.remote_url are both set: unset one")
        self.config = config
        self._remote = remote.Client(config) if config.remote_url else None
        self._pool = Pool(config.workers, config.deadline_s, config.function)
        self._known: dict[tuple[str, str, str], Verdict] = {}
        self._last: dict[str, float] = {}
        if config.function:
            self._pool.check()

    def score(self, texts: Sequence[str], golds: Sequence[str], answer_types: Sequence[str]) -> list[Outcome]:
        """Grades a batch; `texts[i]` against `golds[i]` by route `answer_types[i]`. Order is kept.

        Raises:
            ValueError: the lists differ in length.
            TimeoutRateError: too many of these answers timed out.
            ConnectionError: a remote grader cannot be reached.
        """
        if not len(texts) == len(golds) == len(answer_types):
            raise ValueError(f"{len(texts)} texts, {len(golds)} golds, {len(answer_types)} types: lengths must agree")
        if self._remote is not None:
            graded, slow = self._remote.grade(texts, golds, answer_types), 0
        else:
            graded, slow = self._grade(texts, golds, answer_types)
        weights = self.config.accuracy_weight, self.config.format_weight
        outcomes = []
        for text, (verdict, accuracy) in zip(texts, graded, strict=True):
            form = format_reward(text)
            outcomes.append(Outcome(verdict, accuracy, form, weights[0] * accuracy + weights[1] * form))
        self._count(outcomes, slow)
        return outcomes

    def gold_errors(self, golds: Sequence[str], answer_types: Sequence[str]) -> list[str | None]:
        """`grader.gold_error` for each gold answer, under the deadline."""
        futures = [self._pool.submit(["gold", g, t]) for g, t in zip(golds, answer_types, strict=True)]
        errors: list[str | None] = []
        for gold, future in zip(golds, futures, strict=True):
            message, _ = future.result()
            failed = message in ("timeout", "error")
            errors.append(f"gold answer {gold[:80]!r}: parsing ended in {message}" if failed else message)
        return errors

    def stats(self) -> dict[str, float]:
        """Shares of the last batch by verdict, and how many workers had to be replaced since the start."""
        return {**self._last, "perf/grader_restarts": float(self._pool.restarts)}

    def close(self) -> None:
        """Ends all processes."""
        self._pool.close()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grade(
        self, texts: Sequence[str], golds: Sequence[str], answer_types: Sequence[str]
    ) -> tuple[list[Graded], int]:
        graded: list[Graded | None] = [None] * len(texts)
        waiting: dict[tuple[str, ...], list[int]] = {}
        for i, row in enumerate(zip(texts, golds, answer_types, strict=True)):
            if self.config.function:
                waiting.setdefault(("user", *row), []).append(i)
                continue
            content, hedged = final_answer(row[0])
            verdict: Verdict | None = "no_answer"
            if content is not None:
                verdict = grader.decide_fast("" if hedged else content, row[1], row[2])  # ty: ignore[invalid-argument-type]
            if verdict is not None:
                graded[i] = (verdict, float(verdict == "correct"))
            else:
                waiting.setdefault(("grade", content or "", row[1], row[2]), []).append(i)
        futures = {task: self._pool.submit(list(task)) for task in waiting if task[1:] not in self._known}
        for task, members in waiting.items():
            if task in futures:
                result = futures[task].result()
                if task[0] == "grade" and result[0] in ("correct", "wrong"):
                    self._remember(task[1:], result[0])
            else:
                verdict = self._known[task[1:]]  # ty: ignore[invalid-argument-type]
                result = (verdict, float(verdict == "correct"))
            for i in members:
                graded[i] = (result[0], result[1])
        return [g for g in graded if g is not None], sum(map(len, waiting.values()))

    def _remember(self, key: tuple[str, ...], verdict: Verdict) -> None:
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[key] = verdict  # ty: ignore[invalid-assignment]

    def _count(self, outcomes: list[Outcome], slow: int) -> None:
        if not outcomes:
            return
        counts = Counter(o.verdict for o in outcomes)
        share = {v: counts[v] / len(outcomes) for v in ("timeout", "error", "no_answer")}
        self._last = {f"reward/{v}_rate": s for v, s in share.items()}
        self._last["reward/algebra_fraction"] = slow / len(outcomes)
        if share["timeout"] > self.config.max_timeout_rate:
            raise TimeoutRateError(
                f"{counts['timeout']} of {len(outcomes)} answers timed out in the grader, more than "
                f"rewards.max_timeout_rate {self.config.max_timeout_rate}: look at the samples, and raise it, or "
                f"rewards.deadline_s ({self.config.deadline_s} s) if the node is overloaded"
            )
