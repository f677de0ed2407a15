"""`Scorer`: grades batches of completions; can neither hang nor lose a batch to one completion.

Letters, numbers and words are decided in the calling process, by form and in microseconds. What must be
evaluated, and every user function, runs in processes that can be killed (`process_pool.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from trainer import config as configuration
from trainer.algorithm.traces import Outcome, Verdict
from trainer.config import ConfigError
from trainer.rewards import remote
from trainer.rewards.grading import grader
from trainer.rewards.grading.extraction import MAX_BOX_CHARS, final_answer, format_reward
from trainer.rewards.judge import Case, Judge
from trainer.rewards.process_pool import ProcessPool

MAX_REMEMBERED = 100_000
"""Verdicts of evaluated expressions kept, so that a group's equal answers are worked out once."""

Graded = tuple[Verdict, float]


class TimeoutRateError(RuntimeError):
    """More completions of one batch timed out than `rewards.max_timeout_rate` allows."""


@dataclass
class Batch:
    """Completions under way."""

    texts: Sequence[str]
    graded: list[Graded | None]
    """By row; None until its task is done."""
    futures: dict[tuple[str, ...], Future[Any]] = field(default_factory=dict)
    members: dict[tuple[str, ...], list[int]] = field(default_factory=dict)
    """Task -> the rows that wait for it."""
    cases: dict[int, Case] = field(default_factory=dict)
    """By row, what the judge is asked if the rules call it wrong."""


class Scorer:
    """Grades completions against the reference answers of their rows.

    Thread-safe. Holds no process before the first completion that needs one, unless a user function
    must be checked.

    Raises:
        ConfigError: the user function cannot be loaded, or function and remote_url are both set.
    """

    def __init__(self, config: configuration.Rewards):
        if config.function and config.remote_url:
            raise ConfigError("rewards.function and rewards.remote_url are both set: unset one")
        if config.judge_url and (config.function or config.remote_url):
            other = "function" if config.function else "remote_url"
            raise ConfigError(
                f"rewards.judge_url and rewards.{other} are both set: unset one (a server has its own)"
            )
        self.config = config
        self._judge = Judge(config) if config.judge_url else None
        self._judged_types = config.judge_types.split(",")
        self._remote = remote.Client(config) if config.remote_url else None
        self._pool = ProcessPool(config.workers, config.deadline_s, config.function)
        self._known: dict[tuple[str, ...], Verdict] = {}
        self._last: dict[str, float] = {}
        if config.function:
            self._pool.check()

    def score(
        self,
        texts: Sequence[str],
        references: Sequence[str],
        answer_types: Sequence[str],
        questions: Sequence[str] | None = None,
    ) -> list[Outcome]:
        """Grades a batch; `texts[i]` against `references[i]` by route `answer_types[i]`. Order is kept.

        Args:
            texts: whole completions.
            references: contents of the boxes of the reference answers.
            answer_types: `grader.classify` of these.
            questions: their nouns may stand for units; without them only units of the list do.

        Raises:
            ValueError: the lists differ in length.
            TimeoutRateError: too many of these completions timed out.
            ConnectionError: a remote grader cannot be reached.
        """
        questions = questions or [""] * len(texts)
        if not len(texts) == len(references) == len(answer_types) == len(questions):
            lengths = f"{len(texts)} texts, {len(references)} references, {len(answer_types)} types"
            raise ValueError(f"{lengths}, {len(questions)} questions: lengths must agree")
        if self._remote is not None:
            graded = self._remote.grade(texts, references, answer_types, questions)
            return self._outcomes(texts, graded, 0, 0)
        return self.finish(self.begin(texts, references, answer_types, questions))

    def begin(
        self,
        texts: Sequence[str],
        references: Sequence[str],
        answer_types: Sequence[str],
        questions: Sequence[str],
    ) -> Batch:
        """Decides at once what needs no evaluation, and hands the rest to the processes."""
        batch = Batch(texts, [None] * len(texts))
        for i, row in enumerate(zip(texts, references, answer_types, questions, strict=True)):
            if self.config.function:
                batch.members.setdefault(("user", *row[:3]), []).append(i)
                continue
            content, hedged = final_answer(row[0])
            verdict: Verdict | None = "no_answer"
            if self._judge and content and not hedged and row[2] in self._judged_types:
                batch.cases[i] = (content[:MAX_BOX_CHARS], row[1], row[3])
            if content is not None:
                verdict = grader.decide_fast("" if hedged else content, *row[1:])  # ty: ignore[invalid-argument-type]
                verdict = verdict or self._known.get((content, *row[1:]))
            if verdict is not None:
                batch.graded[i] = (verdict, float(verdict == "correct"))
            else:
                batch.members.setdefault(("grade", content or "", *row[1:]), []).append(i)
        batch.futures = {task: self._pool.submit(list(task)) for task in batch.members}
        return batch

    def finish(self, batch: Batch) -> list[Outcome]:
        """Waits for the processes, then asks the judge.

        Raises TimeoutRateError, and ConfigError as the judge does.
        """
        for task, members in batch.members.items():
            verdict, accuracy = batch.futures[task].result()
            if task[0] == "grade" and verdict in ("correct", "wrong"):
                if len(self._known) >= MAX_REMEMBERED:
                    self._known.clear()
                self._known[task[1:]] = verdict
            for i in members:
                batch.graded[i] = (verdict, accuracy)
        slow = sum(map(len, batch.members.values()))
        graded = [g for g in batch.graded if g is not None]
        if self._judge is not None:
            asked = [i for i in batch.cases if graded[i][0] == "wrong"]
            for i, verdict in zip(asked, self._judge.verdicts([batch.cases[i] for i in asked]), strict=True):
                graded[i] = (verdict, float(verdict == "correct"))
        return self._outcomes(batch.texts, graded, slow, len(asked) if self._judge else 0)

    def reference_errors(
        self, references: Sequence[str], answer_types: Sequence[str], questions: Sequence[str] | None = None
    ) -> list[str | None]:
        """`grader.reference_error` for each reference answer, under the deadline."""
        rows = zip(references, answer_types, questions or [""] * len(references), strict=True)
        futures = [self._pool.submit(["reference", *row]) for row in rows]
        errors: list[str | None] = []
        for reference, future in zip(references, futures, strict=True):
            message, _ = future.result()
            failed = message in ("timeout", "error")
            errors.append(
                f"reference answer {reference[:80]!r}: reading it ended in {message}" if failed else message
            )
        return errors

    def stats(self) -> dict[str, float]:
        """Shares of the last batch by verdict, and how many workers had to be replaced since the start."""
        found = {**self._last, "perf/grader_restarts": float(self._pool.restarts)}
        if self._judge is not None:
            found |= {
                "perf/judge_requests": self._judge.requests,
                "perf/judge_remembered": self._judge.remembered,
            }
        return found

    def resume(self, logged: Mapping[str, float]) -> None:
        """Counts the judge's requests on from the metrics of the step that a run resumes from."""
        if self._judge is not None:
            self._judge.requests = int(logged.get("perf/judge_requests", 0))

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _outcomes(
        self, texts: Sequence[str], graded: Sequence[Graded], slow: int, judged: int
    ) -> list[Outcome]:
        outcomes = []
        for text, (verdict, accuracy) in zip(texts, graded, strict=True):
            form = format_reward(text)
            reward = self.config.accuracy_weight * accuracy + self.config.format_weight * form
            outcomes.append(Outcome(verdict, accuracy, form, reward))
        self._count(outcomes, slow, judged)
        return outcomes

    def _count(self, outcomes: list[Outcome], slow: int, judged: int) -> None:
        if not outcomes:
            return
        counts = Counter(o.verdict for o in outcomes)
        share = {v: counts[v] / len(outcomes) for v in ("timeout", "error", "no_answer")}
        self._last = {f"reward/{v}_rate": s for v, s in share.items()}
        self._last["reward/algebra_fraction"] = slow / len(outcomes)
        if self._judge is not None:
            self._last["reward/judged_fraction"] = judged / len(outcomes)
        if share["timeout"] > self.config.max_timeout_rate:
            raise TimeoutRateError(
                f"{counts['timeout']} of {len(outcomes)} completions timed out in the grader, more than "
                f"rewards.max_timeout_rate {self.config.max_timeout_rate}: look at the samples, and raise it, or "
                f"rewards.deadline_s ({self.config.deadline_s} s) if the node is overloaded"
            )
